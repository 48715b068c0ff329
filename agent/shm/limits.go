package shm

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// sliceBytes is what is copied inside a gate at a time: some ten microseconds, which is what a
	// Revoke may have to wait.
	sliceBytes = 256 << 10
	// slicePieces bounds the same for tiny pieces.
	slicePieces = 1024
	// quantumBytes is what a connection gets of a worker before the next one's turn.
	quantumBytes = 1 << 20
	// spanCost is what a piece costs of the quantum besides its bytes.
	spanCost = 64
	// maxWorkers bounds the copy workers: two or three saturate a machine's memory.
	maxWorkers = 4

	// framePieces is how many pieces one PIECES frame holds: 48 KiB.
	framePieces = 2048
	// maxFixed bounds the bodies of frames that hold neither pieces nor a notification.
	maxFixed = 1024
	// maxText bounds a reason told to the peer.
	maxText = 512
	// maxName bounds an agent's name.
	maxName = 128
	// maxFDs is how many received descriptors may wait for their SEGMENT frame. Each is sent with
	// its own frame, so more than a few is not an honest peer.
	maxFDs = 4
	// maxQueued bounds the frames that wait to be sent to a peer that does not read; a peer beyond
	// it is lost. An honest one never has more than some per transfer in flight.
	maxQueued = 1 << 16
	// tellEvery is how often at most the poster of a long WRITE hears that bytes move.
	tellEvery = 50 * time.Millisecond
	// jobOverhead is what an incoming transfer costs besides its pieces, in bytes.
	jobOverhead = 512
	// pieceCost is what a piece of an incoming transfer costs, in bytes.
	pieceCost = 24

	// helloTimeout is how long either side waits for the other's first frame. Both are on one
	// host, and a hello needs no work.
	helloTimeout = 5 * time.Second
	// maxGreeting is how many connections may be in their hello. One more ends the oldest: an
	// honest peer's hello takes microseconds.
	maxGreeting = 64

	// acceptPause is how long accepting rests when it fails.
	acceptPause = 50 * time.Millisecond

	// maxStaged bounds the bytes of one transfer out of borrowed memory, and of all such READs of
	// one peer together.
	maxStaged = 256 << 20

	// stopGrace bounds how long a cancelled WRITE waits for the peer's word that it has stopped.
	stopGrace = time.Second
)

// maxMapped bounds the memory that one peer may make us map: no honest pool is larger than the
// machine.
func maxMapped() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 1 << 40
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
