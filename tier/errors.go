package tier

import "errors"

// ErrClosed is returned after Close.
var ErrClosed = errors.New("the cpu tier is closed")
