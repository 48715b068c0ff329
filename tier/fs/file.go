package fs

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/kvferry/kvferry/tier/core"
)

// The header of a block's file, little-endian:
//
//	0   8  magic "KVFERRY1"
//	8  32  SHA-256 of the facts
//	40  4  length of the key, bytes
//	44  8  length of the payload, bytes
//	52  4  CRC32C of the payload
//	56  n  key
//	56+n 4 CRC32C of all before
const (
	magic     = "KVFERRY1"
	fixedHead = 56
	sumLen    = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// What is wrong with a file, for errors.Is.
var (
	// ErrForeign: not a file of this version, or of another model, or of another key.
	ErrForeign = errors.New("not a block of this store")
	// ErrTorn: cut off, or longer than it says.
	ErrTorn = errors.New("not whole")
	// ErrSum: its bytes are not those that were written.
	ErrSum = errors.New("checksum differs")
)

type facts [sha256.Size]byte

func headLen(key core.Key) int { return fixedHead + len(key) + sumLen }

// fileSize is what a block takes of the budget, bytes.
func fileSize(key core.Key, payload int) int64 {
	n := int64(headLen(key) + payload)
	return (n + grain - 1) / grain * grain
}

func appendHead(b []byte, f facts, key core.Key, payload []byte) []byte {
	start := len(b)
	b = append(b, magic...)
	b = append(b, f[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(key)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(payload, castagnoli))
	b = append(b, key...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// head is what a header says.
type head struct {
	key     core.Key
	payload uint64
	sum     uint32
}

// readHead reads and checks a header. Bytes beyond it are not read.
func readHead(r io.Reader, f facts) (head, error) {
	b := make([]byte, fixedHead, fixedHead+maxKey+sumLen)
	if _, err := io.ReadFull(r, b); err != nil {
		return head{}, short(err)
	}
	if string(b[:len(magic)]) != magic {
		return head{}, fmt.Errorf("%w: it begins otherwise", ErrForeign)
	}
	n := binary.LittleEndian.Uint32(b[40:])
	if n > maxKey {
		return head{}, fmt.Errorf("%w: its key has %d bytes", ErrForeign, n)
	}
	b = b[:fixedHead+int(n)+sumLen]
	if _, err := io.ReadFull(r, b[fixedHead:]); err != nil {
		return head{}, short(err)
	}
	end := len(b) - sumLen
	if binary.LittleEndian.Uint32(b[end:]) != crc32.Checksum(b[:end], castagnoli) {
		return head{}, fmt.Errorf("header: %w", ErrSum)
	}
	if !bytes.Equal(b[len(magic):len(magic)+len(f)], f[:]) {
		return head{}, fmt.Errorf("%w: it is of another model", ErrForeign)
	}
	return head{
		key:     core.Key(b[fixedHead:end]),
		payload: binary.LittleEndian.Uint64(b[44:]),
		sum:     binary.LittleEndian.Uint32(b[52:]),
	}, nil
}

func short(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrTorn
	}
	return err
}

// readBlock fills dst from a file, or says why its content cannot be used; dst is then of no meaning.
func readBlock(path string, f facts, key core.Key, dst []byte) (core.Sum, error) {
	h, err := readChecked(path, f, key, dst)
	return core.Sum{CRC: h.sum, Known: err == nil}, err
}

func readChecked(path string, f facts, key core.Key, dst []byte) (h head, err error) {
	file, err := os.Open(path)
	if err != nil {
		return h, err
	}
	defer func() { _ = file.Close() }() // it was only read
	if h, err = readHead(file, f); err != nil {
		return h, err
	}
	if h.key != key || h.payload != uint64(len(dst)) {
		return h, fmt.Errorf("%w: it holds %d bytes of key %x", ErrForeign, h.payload, string(h.key))
	}
	if _, err := io.ReadFull(file, dst); err != nil {
		return h, short(err)
	}
	if n, _ := file.Read(make([]byte, 1)); n != 0 {
		return h, fmt.Errorf("%w: more bytes follow", ErrTorn)
	}
	if crc32.Checksum(dst, castagnoli) != h.sum {
		return h, ErrSum
	}
	return h, nil
}

// writeBlock writes a file under tmp, makes sure that it is on the disk, and gives it its name.
func writeBlock(tmp, path, dir string, f facts, key core.Key, payload []byte) (err error) {
	file, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp) // what is left of it is removed at the next start
		}
	}()
	_, err = file.Write(appendHead(nil, f, key, payload))
	if err == nil {
		_, err = file.Write(payload)
	}
	if err == nil {
		err = file.Sync()
	}
	if e := file.Close(); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	if err = os.Rename(tmp, path); err != nil {
		return err
	}
	if err = syncDir(dir); err != nil {
		_ = os.Remove(path) // it may be gone after a crash, so it is not promised
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if e := d.Close(); err == nil {
		err = e
	}
	return err
}
