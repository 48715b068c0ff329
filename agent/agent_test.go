package agent

import (
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

func TestOutcomesHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for o := OutcomeDone; o <= OutcomeClosed; o++ {
		if s := o.String(); s == "" || seen[s] || strings.HasPrefix(s, "outcome ") {
			t.Errorf("outcome %d is %q", uint8(o), s)
		} else {
			seen[s] = true
		}
	}
	if s := Outcome(200).String(); s != "outcome 200" {
		t.Errorf("unknown outcome is %q", s)
	}
}

func TestLimitsDefault(t *testing.T) {
	if got := (Limits{}).WithDefaults(); got != DefaultLimits {
		t.Errorf("%+v", got)
	}
	got := Limits{Peers: 3, Lists: -1}.WithDefaults()
	if got.Peers != 3 || got.Lists != DefaultLimits.Lists {
		t.Errorf("%+v", got)
	}
	// A field that is forgotten in WithDefaults would be no limit at all.
	v := reflect.ValueOf(DefaultLimits)
	for i := range v.NumField() {
		if v.Field(i).Int() <= 0 {
			t.Errorf("%s has no default", v.Type().Field(i).Name)
		}
	}
}

func TestErrorsNameWhatHappened(t *testing.T) {
	err := error(&PeerError{Peer: "d", Addr: "host:1", Phase: "dial", Err: io.EOF})
	if !errors.Is(err, io.EOF) || err.Error() != "peer agent d at host:1: dial: EOF" {
		t.Error(err)
	}
	err = &LimitError{What: "lists", Got: 3, Limit: 2}
	if err.Error() != "lists: 3 is beyond the limit of 2" {
		t.Error(err)
	}
	err = &PostError{Op: Write, Reason: "no indices"}
	if err.Error() != "transfer refused: no indices" {
		t.Error(err)
	}
}
