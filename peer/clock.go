package peer

import "time"

var processStart = time.Now()

// Now is the process's monotonic clock in seconds, of an arbitrary zero: what side channels tell.
func Now() float64 { return At(time.Now()) }

// At is what that clock shows at a moment of this process.
func At(t time.Time) float64 { return t.Sub(processStart).Seconds() }
