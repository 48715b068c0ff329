package store

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/kvferry/kvferry/wire"
)

// Facts are what makes the blocks of one engine those of another: equal facts and equal keys mean equal
// bytes.
type Facts struct {
	Fingerprint string `json:"fingerprint"`
	HashSeed    string `json:"hash_seed"`
	BlockLen    int    `json:"block_len"` // bytes
}

// factsOf reads them from a connect, or says why they are no use.
func factsOf(c *wire.P2PConnect) (Facts, string) {
	switch {
	case c.Extension == nil:
		return Facts{}, "it is no kvferry node, and the store has no agent for others"
	case c.Fingerprint == "":
		return Facts{}, "it has no fingerprint: blocks of different models could not be told apart"
	case c.BlockLen > 1<<31:
		return Facts{}, fmt.Sprintf("its blocks have %d bytes", c.BlockLen)
	}
	return Facts{c.Fingerprint, c.HashSeed, int(c.BlockLen)}, ""
}

// idLen is how many bytes of a hash name a namespace. That two have one name costs the second its files, not
// more: the whole of the facts is in each.
const idLen = 8

// ID is a short name of the facts: 16 hexadecimal digits.
func (f Facts) ID() string {
	sum := sha256.Sum256([]byte(f.text()))
	return hex.EncodeToString(sum[:idLen])
}

// String is the facts for people. Peers' words are told in a form that does no harm to a log.
func (f Facts) String() string {
	return fmt.Sprintf("fingerprint %s, hash seed %s, blocks of %d bytes", printable(f.Fingerprint, namedLen), printable(f.HashSeed, namedLen), f.BlockLen)
}

// text is the facts as package fs wants them.
func (f Facts) text() string { return fmt.Sprintf("%q %q %d", f.Fingerprint, f.HashSeed, f.BlockLen) }

const (
	recordName = "namespace.json"
	// removedSuffix ends the name of a namespace's folder that is being deleted.
	removedSuffix = ".removed"
)

// record writes the facts beside their blocks, whole or not at all.
func record(dir string, f Facts) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, recordName)
	tmp := path + ".tmp"
	if err := write(tmp, append(b, '\n')); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	return syncDir(dir)
}

func write(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// readRecords finds the namespaces of a folder. Folders that are not ours, or whose record cannot be read,
// are told and left alone.
func readRecords(folder string, odd func(path string, err error)) ([]Facts, error) {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Facts
	for _, e := range entries {
		dir := filepath.Join(folder, e.Name())
		if !e.IsDir() {
			odd(dir, errors.New("not a folder"))
			continue
		}
		if isRemoved(e.Name()) {
			if err := os.RemoveAll(dir); err != nil {
				return nil, fmt.Errorf("finish the removal of a namespace: %w", err)
			}
			continue
		}
		facts, err := readRecord(filepath.Join(dir, recordName))
		if err == nil && facts.ID() != e.Name() {
			err = errors.New("its record is of another namespace")
		}
		if err != nil {
			odd(dir, err)
			continue
		}
		out = append(out, facts)
	}
	return out, nil
}

// isRemoved reports whether a folder is a namespace's whose removal was not finished.
func isRemoved(name string) bool {
	id, ok := strings.CutSuffix(name, removedSuffix)
	b, err := hex.DecodeString(id)
	return ok && err == nil && len(b) == idLen
}

func readRecord(path string) (facts Facts, err error) {
	f, err := os.Open(path)
	if err != nil {
		return facts, err
	}
	defer func() { _ = f.Close() }() // it was only read
	b, err := io.ReadAll(io.LimitReader(f, maxRecordLen))
	if err != nil {
		return facts, err
	}
	if err := json.Unmarshal(b, &facts); err != nil {
		return facts, fmt.Errorf("%s: %w", recordName, err)
	}
	if facts.Fingerprint == "" || facts.HashSeed == "" || facts.BlockLen < 1 {
		return facts, fmt.Errorf("%s: facts are missing", recordName)
	}
	return facts, nil
}
