package tier

// Apply is for the tests of this package from outside.
func Apply(f Fault, b []byte) { f.apply(b) }
