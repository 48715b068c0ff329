package fs

import (
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvferry/kvferry/tier/core"
)

const (
	suffix    = ".kvb"
	tmpSuffix = ".tmp"
	tmpDir    = "tmp"
	lockName  = "lock"
)

// Dropped is one file that is not served, and why.
type Dropped struct {
	Path   string
	Reason error
}

// Recovery is what Start found.
type Recovery struct {
	Blocks int   // that can be served
	Bytes  int64 // of the budget
	// Dropped were removed: unfinished, torn, or beyond the budget. Foreign were left where they are.
	// The lists are cut at a hundred; the counts are not.
	Dropped, Foreign       []Dropped
	DroppedAll, ForeignAll int
}

func (r *Recovery) drop(path string, why error) {
	r.DroppedAll++
	if len(r.Dropped) < maxReported {
		r.Dropped = append(r.Dropped, Dropped{path, why})
	}
}

func (r *Recovery) foreign(path string, why error) {
	r.ForeignAll++
	if len(r.Foreign) < maxReported {
		r.Foreign = append(r.Foreign, Dropped{path, why})
	}
}

// found is a file that can be served.
type found struct {
	key  core.Key
	size int64
	used time.Time
}

// scan reads the folder, removes what is ours and cannot be served, and returns the rest, least
// recently used first.
func (t *Tier) scan(rec *Recovery) ([]found, error) {
	var out []found
	err := filepath.WalkDir(t.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || path == filepath.Join(t.dir, lockName) {
			return err
		}
		f, reason, ours := t.inspect(path, d)
		switch {
		case reason == nil:
			out = append(out, f)
		case !ours:
			rec.foreign(path, reason)
		default:
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("remove a file that cannot be served: %w", err)
			}
			rec.drop(path, reason)
		}
		return nil
	})
	slices.SortStableFunc(out, func(a, b found) int { return a.used.Compare(b.used) })
	return out, err
}

// inspect says what a file is; reason is nil for a block that can be served. ours says that it bears
// a name that only this package gives.
func (t *Tier) inspect(path string, d fs.DirEntry) (f found, reason error, ours bool) {
	name, dir := d.Name(), filepath.Dir(path)
	if dir == filepath.Join(t.dir, tmpDir) && strings.HasSuffix(name, tmpSuffix) {
		return f, fmt.Errorf("%w: its writer ended before it was done", ErrTorn), true
	}
	key, err := hex.DecodeString(strings.TrimSuffix(name, suffix))
	f.key = core.Key(key)
	if err != nil || !strings.HasSuffix(name, suffix) || !d.Type().IsRegular() || path != t.path(f.key) {
		return f, fmt.Errorf("%w: no such name is given here", ErrForeign), false
	}
	info, err := d.Info()
	if err != nil {
		return f, err, true
	}
	file, err := os.Open(path)
	if err != nil {
		return f, err, true
	}
	defer func() { _ = file.Close() }() // it was only read
	h, err := readHead(file, t.facts)
	switch {
	case err != nil:
		return f, err, true
	case h.key != f.key:
		return f, fmt.Errorf("%w: it holds another key", ErrForeign), true
	case h.payload != uint64(t.cfg.BlockLen):
		return f, fmt.Errorf("%w: its block has %d bytes instead of %d", ErrForeign, h.payload, t.cfg.BlockLen), true
	case info.Size() != int64(headLen(f.key))+int64(h.payload):
		return f, fmt.Errorf("%w: %d bytes of %d", ErrTorn, info.Size(), int64(headLen(f.key))+int64(h.payload)), true
	}
	f.size, f.used = fileSize(f.key, t.cfg.BlockLen), info.ModTime()
	return f, nil, true
}
