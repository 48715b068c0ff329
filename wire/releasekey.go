package wire

// ReleaseKeyHeader is the HTTP header of a prefill leg by which its router may let go what the leg will
// hold, without its answer: POST /kv/release with {"key": KEY}. Stock engines do not look at it.
const ReleaseKeyHeader = "X-Kvferry-Release-Key"

// ReleaseKeyLen is the length of a key: 128 random bits in hexadecimal.
const ReleaseKeyLen = 32

// IsReleaseKey tells whether a text has the form of a key.
func IsReleaseKey(s string) bool {
	if len(s) != ReleaseKeyLen {
		return false
	}
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
