package session

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// behaviours maps the numbers of p2p-tier.md, section 12, to the scenario files and tests that hold
// them. "x/y" is a file in testdata, "dir.TestX" a test; what follows a dash is where this
// tier does otherwise, and why. Numbers that are not here belong to a form that is not spoken.
var behaviours = map[int]string{
	1:  "scenarios/handshake",
	2:  "scenarios/handshake",
	3:  "scenarios/handshake",
	4:  "scenarios/handshake",
	5:  "scenarios/refused",
	6:  "scenarios/refused",
	7:  "scenarios/refused",
	8:  "scenarios/handshake",
	9:  "scenarios/handshake",
	10: "scenarios/behaviours",
	11: "scenarios/behaviours - a session begins with its dial; supplies wait at the hub",
	12: "scenarios/handshake scenarios/sessions - a second connection is another session",
	13: "scenarios/behaviours scenarios/sessions",
	14: "scenarios/behaviours",
	15: "scenarios/sessions tier/p2p.TestHazardP2P_H20_H23_PeerFloodsAndDoesNotRead",
	16: "scenarios/odd-messages wire.TestP2PInvalidClass",
	17: "scenarios/odd-messages wire.TestP2PInvalidClass",
	18: "scenarios/odd-messages",
	19: "wire.TestP2PConnectVectors wire.TestP2PFetchVectors wire.TestP2PTransferDoneVectors",
	22: "scenarios/behaviours - the load ends at once, as its grant is revoked",
	23: "scenarios/behaviours hazards/h03-late-write-finish",
	25: "scenarios/behaviours",
	27: "scenarios/handshake - a request that asks keeps its session from eviction",
	28: "scenarios/behaviours tier/p2p.TestReplayAsConsumer",
	29: "scenarios/behaviours",
	30: "scenarios/behaviours hazards/h12-late-answer",
	32: "hazards/h12-late-answer tier/p2p.TestReplayAsConsumer - a miss stays one for its request",
	34: "scenarios/behaviours",
	35: "scenarios/behaviours hazards/h16-no-lookup-answer",
	36: "scenarios/behaviours - resolved ones too, as they cannot be fetched any more",
	37: "scenarios/behaviours",
	38: "scenarios/behaviours",
	39: "scenarios/behaviours",
	40: "scenarios/serving",
	41: "scenarios/serving",
	42: "scenarios/serving",
	43: "scenarios/behaviours",
	44: "scenarios/behaviours",
	45: "scenarios/behaviours scenarios/serving",
	46: "scenarios/serving",
	47: "scenarios/prefill tier/p2p.TestPrefillThenDecode",
	50: "hazards/h05-source-pins - an ack is never forced: it comes when the agent has stopped",
	51: "scenarios/behaviours hazards/h01-stale-pin",
	52: "scenarios/prefill",
	53: "hazards/h17-prefill-first-partial",
	55: "scenarios/prefill",
	56: "scenarios/behaviours hazards/h08-registration-fails",
	57: "scenarios/prefill",
	59: "tier/p2p/session.TestNodesKeepTheirPromises",
	60: "tier/p2p.TestPullFromAPeer tier/p2p.TestUnusableParameters",
	61: "tier/p2p.TestPrefillThenDecode",
	62: "tier/p2p.TestPrefillThenDecode tier/p2p.TestUnusableParameters",
	63: "wire.TestParseP2PParams",
	64: "tier/p2p.TestUnusableParameters",
	65: "tier/p2p.TestUnusableParameters - a request that names nothing gets no store job",
	66: "tier/p2p.TestUnusableParameters",
	67: "tier/p2p.TestSourceDies scenarios/sessions",
	68: "tier/p2p.TestPeerIDInUse scenarios/sessions - the ROUTER refuses it",
	69: "scenarios/prefill tier/p2p.TestPrefillThenDecode",
	70: "hazards/h27-decoder-cached",
	71: "scenarios/sessions tier/p2p.TestHazardP2P_H21_CloseAfterUnreachablePeer",
	72: "hazards/h27-decoder-cached hazards/h17-prefill-first-partial",
	76: "tier/p2p.TestReconnects",
	77: "tier/p2p.TestReconnects - by its TestMain, which finds goroutines left behind",
	78: "scenarios/sessions tier/p2p.TestReconnects",
}

// numbersOf12 are those that section 12 gives, but of the fork.
func numbersOf12() (all []int) {
	for _, r := range [][2]int{{1, 19}, {22, 23}, {25, 25}, {27, 30}, {32, 32}, {34, 47}, {50, 53}, {55, 57}, {59, 72}, {76, 78}} {
		for n := r[0]; n <= r[1]; n++ {
			all = append(all, n)
		}
	}
	return all
}

func TestBehavioursHaveScenarios(t *testing.T) {
	for _, n := range numbersOf12() {
		if behaviours[n] == "" {
			t.Errorf("behaviour %d has no scenario", n)
		}
	}
	named := map[string]bool{}
	for n, where := range behaviours {
		if !slices.Contains(numbersOf12(), n) {
			t.Errorf("%d is not in section 12", n)
		}
		where, _, _ = strings.Cut(where, " - ")
		for _, w := range strings.Fields(where) {
			named[w] = true
		}
	}
	for w := range named {
		if i := strings.LastIndex(w, ".Test"); i >= 0 {
			if !hasTest(t, w[:i], w[i+1:]) {
				t.Errorf("there is no %s", w)
			}
		} else if _, err := os.Stat(filepath.Join("testdata", w)); err != nil {
			t.Error(err)
		}
	}
	if len(named) < 20 {
		t.Errorf("only %v", fmt.Sprint(named))
	}
}

func hasTest(t *testing.T, dir, name string) bool {
	files, err := filepath.Glob(filepath.Join("..", "..", "..", filepath.FromSlash(dir), "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	re := regexp.MustCompile(`(?m)^func ` + name + `\(`)
	return slices.ContainsFunc(files, func(f string) bool {
		src, err := os.ReadFile(f)
		return err == nil && re.Match(src)
	})
}
