package p2p

import (
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/zmtp"
)

// heartbeat is the PINGs that are sent, if any. Without them nothing wakes this process while nobody says
// anything.
func heartbeat(every time.Duration) zmtp.Heartbeat {
	if every <= 0 {
		return zmtp.Heartbeat{}
	}
	return zmtp.Heartbeat{Every: every, Timeout: pingTimeout, TTL: pingTTL}
}

// watch has the kernel find out when a peer's host is gone: it probes a silent connection, and ends
// one on which sent bytes stay unacknowledged. A process that stands still on a living host is found when it
// owes something, by a PING (session.Probe). Connections that are not TCP are left as they are.
func watch(c net.Conn) {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	// Errors leave the system's own bounds, which are longer.
	_ = tc.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepAliveIdle, Interval: keepAliveEvery, Count: keepAliveTries})
	if raw, err := tc.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unackedTimeout.Milliseconds()))
		})
	}
}

// watchful is a listener whose connections are watched.
type watchful struct{ net.Listener }

func (l watchful) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		watch(c)
	}
	return c, err
}
