package peer

import "time"

var processStart = time.Now()

// Now is the process's monotonic clock in seconds, of an arbitrary zero: what side channels tell.
func Now() float64 { return time.Since(processStart).Seconds() }
