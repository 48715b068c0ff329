package engine

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
)

// What two engines on one host choose, whatever each was told; and how they fail if they have nothing
// in common.
func TestTransports(t *testing.T) {
	for _, c := range []struct{ p, d, want string }{
		{TransportAuto, TransportAuto, TransportSHM},
		{TransportSHM, TransportSHM, TransportSHM},
		{TransportTCP, TransportTCP, TransportTCP},
		{TransportAuto, TransportTCP, TransportTCP},
		{TransportTCP, TransportAuto, TransportTCP},
		{TransportAuto, TransportSHM, TransportSHM},
		{TransportSHM, TransportAuto, TransportSHM},
		{TransportTCP, TransportSHM, ""},
	} {
		t.Run(c.p+" to "+c.d, func(t *testing.T) {
			t.Parallel()
			x := newPair(t, func(cfg *Config) {
				cfg.Transport = c.p
				if cfg.Role == connector.Consumer {
					cfg.Transport = c.d
				}
			})
			p := prompt(100, 3)
			if c.want == "" {
				_, decode := x.legs("r", p, 3)
				a := generate(t, x.d, decode)
				var cause *connector.Error
				if !errors.As(a.Err, &cause) || cause.Phase != connector.PhaseHandshake || !strings.Contains(cause.Reason, "tcp") {
					t.Errorf("%v", a.Err)
				}
				settle(t, x.d)
				return
			}
			prefill, decode := x.handOff(t, "r", p, 3)
			want := expect(t, p, 3, model.Sampling{})
			checkAnswer(t, "prefill", prefill, want[:1])
			checkAnswer(t, "decode", decode, want)
			if f := decode.Transfer; f.Transport != c.want || f.Why == "" || f.Bytes == 0 || decode.Usage.External != 99 {
				t.Errorf("%+v, want %s", f, c.want)
			}
			settle(t, x.p)
			settle(t, x.d)
		})
	}
}
