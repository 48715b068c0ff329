package main

import (
	"io"
	"net"
	"testing"
	"time"
)

// echo serves connections that give back what they get.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	return l.Addr().String()
}

func dialRelay(t *testing.T, r *relay) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// says sends a text and reports whether it comes back.
func says(c net.Conn, text string) bool {
	if _, err := io.WriteString(c, text); err != nil {
		return false
	}
	back := make([]byte, len(text))
	_, err := io.ReadFull(c, back)
	return err == nil && string(back) == text
}

func TestRelay(t *testing.T) {
	r := testRelay(t)
	r.run(echo(t))
	a := dialRelay(t, r)
	if !says(a, "hello") {
		t.Fatal("nothing comes through")
	}

	r.cut(true)
	if says(a, "x") {
		t.Error("a cut connection carries on")
	}
	if c, err := net.Dial("tcp", r.addr); err == nil { // the reset may come before the end of Dial
		if says(c, "x") {
			t.Error("a new connection works while they are refused")
		}
		_ = c.Close()
	}
	r.accept()
	b := dialRelay(t, r)
	if !says(b, "again") {
		t.Error("nothing comes through after a cut")
	}

	r.hold()
	if _, err := io.WriteString(b, "held"); err != nil {
		t.Fatal(err)
	}
	_ = b.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, _ := b.Read(make([]byte, 8)); n > 0 {
		t.Error("bytes pass a relay that holds them back")
	}
	r.release()
	_ = b.SetReadDeadline(time.Now().Add(patience))
	back := make([]byte, 4)
	if _, err := io.ReadFull(b, back); err != nil || string(back) != "held" {
		t.Errorf("after the release: %q, %v", back, err)
	}
	if err := b.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(b); err != nil || len(rest) != 0 {
		t.Errorf("the end: %q, %v", rest, err)
	}
}

func TestRelayBudget(t *testing.T) {
	t.Run("forth", func(t *testing.T) { relayBudget(t, (*relay).holdAfter) })
	t.Run("back", func(t *testing.T) { relayBudget(t, (*relay).holdAnswersAfter) })
}

func relayBudget(t *testing.T, hold func(*relay, int64)) {
	r := testRelay(t)
	hold(r, 8)
	r.run(echo(t))
	c := dialRelay(t, r)
	if !says(c, "8 bytes!") {
		t.Fatal("the budget does not pass")
	}
	if _, err := io.WriteString(c, "more"); err != nil {
		t.Fatal(err)
	}
	waitHeld(t, r)
}

// The third of four letters is changed by its last bit: c becomes b.
func TestRelaySpoils(t *testing.T) {
	r := testRelay(t)
	r.run(echo(t))
	c := dialRelay(t, r)
	for _, back := range []bool{false, true} {
		r.spoil(8+3, back)
		if !says(c, "8 bytes!") || r.spoiled(back) {
			t.Fatal("a byte is changed too early")
		}
		got := make([]byte, 4)
		if _, err := io.WriteString(c, "abcd"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "abbd" || !r.spoiled(back) {
			t.Errorf("back %v: %q, %v", back, got, err)
		}
		if !says(c, "abcd") {
			t.Error("a second byte is changed")
		}
	}
}
