package session

import "testing"

// The hazards of p2p-tier.md, section 13, as far as they are the session's. Each file says what the
// safe outcome is.

func TestHazardP2P_H1_StalePin(t *testing.T) { runScript(t, "testdata/hazards/h01-stale-pin") }

func TestHazardP2P_H2_LateWriteAfterTimeout(t *testing.T) {
	runScript(t, "testdata/hazards/h02-late-write-timeout")
}

func TestHazardP2P_H3_LateWriteAfterFinish(t *testing.T) {
	runScript(t, "testdata/hazards/h03-late-write-finish")
}

func TestHazardP2P_H4_ReapedSession(t *testing.T) {
	runScript(t, "testdata/hazards/h04-reaped-session")
}

func TestHazardP2P_H5_SourcePinsWhileWriting(t *testing.T) {
	runScript(t, "testdata/hazards/h05-source-pins")
}

func TestHazardP2P_H7_IndexOutOfRange(t *testing.T) {
	runScript(t, "testdata/hazards/h07-index-out-of-range")
}

func TestHazardP2P_H8_RegistrationFails(t *testing.T) {
	runScript(t, "testdata/hazards/h08-registration-fails")
}

func TestHazardP2P_H9_SessionLimit(t *testing.T) { runScript(t, "testdata/hazards/h09-session-limit") }

func TestHazardP2P_H10_SharedID(t *testing.T) { runScript(t, "testdata/hazards/h10-shared-id") }

func TestHazardP2P_H12_LateAnswer(t *testing.T) { runScript(t, "testdata/hazards/h12-late-answer") }

func TestHazardP2P_H14_SecondConnect(t *testing.T) {
	runScript(t, "testdata/hazards/h14-second-connect")
}

func TestHazardP2P_H15_LostResults(t *testing.T) { runScript(t, "testdata/hazards/h15-lost-results") }

func TestHazardP2P_H16_NoLookupAnswer(t *testing.T) {
	runScript(t, "testdata/hazards/h16-no-lookup-answer")
}

func TestHazardP2P_H17_PrefillFirstPartial(t *testing.T) {
	runScript(t, "testdata/hazards/h17-prefill-first-partial")
}

func TestHazardP2P_H18_DuplicateKeys(t *testing.T) {
	runScript(t, "testdata/hazards/h18-duplicate-keys")
}

func TestHazardP2P_H19_Alias(t *testing.T) { runScript(t, "testdata/hazards/h19-alias") }

func TestHazardP2P_H26_Leaks(t *testing.T) { runScript(t, "testdata/hazards/h26-leaks") }

func TestHazardP2P_H27_DecoderCached(t *testing.T) {
	runScript(t, "testdata/hazards/h27-decoder-cached")
}

func TestHazardP2P_H28_GreedyPeer(t *testing.T) { runScript(t, "testdata/hazards/h28-greedy-peer") }

func TestHazardP2P_H29_SourceAndDecoder(t *testing.T) {
	runScript(t, "testdata/hazards/h29-source-and-decoder")
}
