package peer

import (
	"bytes"
	"context"
	"encoding/hex"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
)

// FuzzListener sends arbitrary message frames and, on another connection, arbitrary bytes; the next
// good client must be served.
func FuzzListener(f *testing.F) {
	for _, v := range vectors[behaviourVector](f, "listener-behaviour.json") {
		var frames [][]byte
		for _, h := range v.Frames {
			b, _ := hex.DecodeString(h)
			frames = append(frames, b)
		}
		f.Add(bytes.Join(frames, nil), uint8(len(frames)), v.Socket == "REQ")
	}
	fab := newFabric()
	l := fab.serve(f, addrP, "P", "i", 1)
	f.Cleanup(func() { l.Close() })
	want := payload(f, metadata("P", "i", kv.Rank{}), testHash)
	f.Fuzz(func(t *testing.T, data []byte, cuts uint8, isReq bool) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if conn, err := fab.dial(ctx, "tcp", addrP); err == nil {
			go conn.Write(data)
			conn.Close()
		}
		dealer, err := zmtp.DialDealer(ctx, fab.dial, addrP, zmtp.Options{})
		if err != nil {
			t.Fatal(err)
		}
		frames := cut(data, int(cuts%6))
		if isReq {
			frames = append([][]byte{{}}, frames...)
		}
		if err := dealer.Send(ctx, frames...); err == nil {
			if reply, err := dealer.Recv(ctx); err == nil && (len(reply) != 3 || !bytes.Equal(reply[1], want)) {
				t.Errorf("answered %x", reply)
			} else if err != nil && ctx.Err() != nil {
				t.Errorf("neither answered nor closed: %v", err)
			}
		}
		dealer.Close()
		if got := fab.request(t, goodRequest); !bytes.Equal(got[0], want) {
			t.Error("a good client is not served")
		}
	})
}

// cut makes n+1 frames.
func cut(data []byte, n int) [][]byte {
	frames := make([][]byte, 0, n+1)
	for ; n > 0; n-- {
		frames = append(frames, data[:len(data)/(n+1)])
		data = data[len(data)/(n+1):]
	}
	return append(frames, data)
}
