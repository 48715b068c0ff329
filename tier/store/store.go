package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvferry/kvferry/tier/p2p"
	"github.com/kvferry/kvferry/wire"
)

// Store holds blocks for engines. Its methods may be called from any goroutine.
type Store struct {
	cfg     Config
	front   *p2p.Front
	opening sync.WaitGroup // goroutines that open or replace a namespace

	mu struct {
		sync.Mutex
		table   []*namespace // by place; nil: free
		leaving map[Facts]struct{}
		refused uint64
		closed  bool
	}
}

// New opens what the folder holds and begins to serve. It returns when all of that can be asked for.
func New(cfg Config) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Namespaces = cmp.Or(cfg.Namespaces, 1)
	cfg.Unused = cmp.Or(cfg.Unused, DefaultUnused)
	s := &Store{cfg: cfg}
	s.mu.table, s.mu.leaving = make([]*namespace, cfg.Namespaces), map[Facts]struct{}{}
	front, err := p2p.NewFront(p2p.FrontConfig{Listener: cfg.Listener, Route: s.route, OnRefused: s.refused, PingEvery: cfg.PingEvery})
	if err != nil {
		return nil, err
	}
	s.front = front
	if cfg.Folder != "" {
		if err := s.recover(); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	front.Start()
	return s, nil
}

// recover opens the namespaces of the folder side by side. A store that may not have as many does not
// start: which of them to give up is for its operator to say.
func (s *Store) recover() error {
	if err := os.MkdirAll(s.cfg.Folder, 0o700); err != nil {
		return fmt.Errorf("the folder of the store cannot be used (--fs): %w", err)
	}
	found, err := readRecords(s.cfg.Folder, func(path string, err error) {
		s.note(Note{What: "folder_foreign", Bad: true, Text: fmt.Sprintf("%s is left alone: %v", path, err)})
	})
	if err != nil {
		return err
	}
	if len(found) > s.cfg.Namespaces {
		return s.tooMany(found)
	}
	errs := make([]error, len(found))
	var opening sync.WaitGroup
	for i, facts := range found {
		n := s.newNamespace(facts, i)
		s.mu.table[i] = n
		opening.Go(func() { errs[i] = s.opened(n, n.open()) })
	}
	opening.Wait()
	return errors.Join(errs...)
}

// tooMany names the namespaces of a folder.
func (s *Store) tooMany(found []Facts) error {
	var said []string
	for i, facts := range found {
		if i == namedNamespaces {
			said = append(said, fmt.Sprintf("%d more", len(found)-i))
			break
		}
		said = append(said, fmt.Sprintf("%s (%v)", filepath.Join(s.cfg.Folder, facts.ID()), facts))
	}
	return fmt.Errorf("the folder has blocks of %d models, and the store may hold those of %d (--namespaces): allow it %d, or delete the folders of models that are not needed: %s",
		len(found), s.cfg.Namespaces, len(found), strings.Join(said, "; "))
}

// opened takes note of how an opening went. One that failed leaves its place.
func (s *Store) opened(n *namespace, err error) error {
	if err == nil {
		return nil
	}
	n.port.Close()
	s.leave(n)
	n.note("namespace_failed", true, "", "%v", err)
	return fmt.Errorf("namespace %s: %w", n.facts.ID(), err)
}

// leave frees a namespace's place.
func (s *Store) leave(n *namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.table[n.place] == n {
		s.mu.table[n.place] = nil
	}
}

// remove deletes the files of a namespace that is not open. Its folder has another name first: what is left of
// it after a crash is known for what it is.
func (s *Store) remove(f Facts, why string) error {
	if s.cfg.Folder == "" {
		return nil
	}
	s.note(Note{What: "namespace_removed", Namespace: f.ID(), Bad: true, Text: "its files are deleted: " + why})
	dir := filepath.Join(s.cfg.Folder, f.ID())
	gone := dir + removedSuffix
	if err := os.RemoveAll(gone); err != nil {
		return err
	}
	if err := os.Rename(dir, gone); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.RemoveAll(gone)
}

// route finds or makes the namespace of a peer. It is called on the Front's goroutine.
func (s *Store) route(c *wire.P2PConnect) (*p2p.Port, string) {
	f, why := factsOf(c)
	if why != "" {
		return nil, why
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, "the store is closing"
	}
	for _, n := range s.mu.table {
		if n != nil && n.facts == f {
			return n.port, ""
		}
	}
	if _, ok := s.mu.leaving[f]; ok {
		return nil, "the files of its model are being deleted; it may come again"
	}
	if share := s.cfg.Size / int64(s.cfg.Namespaces); int64(f.BlockLen) > share {
		return nil, fmt.Sprintf("its blocks have %d bytes each, a namespace of the store %d bytes in all: give the store more memory (--size) or fewer --namespaces", f.BlockLen, share)
	}
	place := s.place()
	if place < 0 {
		return nil, s.noPlace(f)
	}
	old := s.mu.table[place]
	if old != nil {
		s.mu.leaving[old.facts] = struct{}{}
	}
	n := s.newNamespace(f, place)
	s.mu.table[place] = n
	s.opening.Go(func() { s.replace(old, n) })
	return n.port, ""
}

// place is where a new namespace may go: a free place, or that of the one unused for longest, if it has
// been for long enough and holds nothing; -1 for none. A newcomer, which may only be set up wrongly, never
// costs others their blocks. The lock is held.
func (s *Store) place() int {
	best, longest := -1, s.cfg.Unused
	now := time.Now()
	for i, n := range s.mu.table {
		if n == nil {
			return i
		}
		if d := n.port.Unused(now); d >= longest && n.empty() {
			best, longest = i, d
		}
	}
	return best
}

// noPlace says why a newcomer gets no namespace, and what can be done. The lock is held.
func (s *Store) noPlace(f Facts) string {
	var kept []string
	for _, n := range s.mu.table {
		if len(kept) == namedNamespaces {
			kept = append(kept, fmt.Sprintf("%d more", len(s.mu.table)-namedNamespaces))
			break
		}
		state := "used a moment ago"
		switch {
		case n.port.Links() > 0:
			state = "in use"
		case !n.empty():
			state = "it holds blocks"
		}
		kept = append(kept, fmt.Sprintf("%s %v (%s)", n.facts.ID(), n.facts, state))
	}
	giveUp := "start the store anew"
	if s.cfg.Folder != "" {
		giveUp = "stop the store and delete the namespace's folder in " + s.cfg.Folder
	}
	return fmt.Sprintf("its model facts, %v, are not those of the store, which keeps %s: start the engine with the model and hash seed of these, "+
		"or allow the store more namespaces than %d (--namespaces); to give up what one holds, %s", f, strings.Join(kept, "; "), s.cfg.Namespaces, giveUp)
}

// replace ends the old namespace of a place, with its files, and opens the new one. What it cannot open
// is told, and its peers are dropped.
func (s *Store) replace(old, n *namespace) {
	var err error
	if old != nil {
		old.note("namespace_replaced", false, "", "it holds nothing, and no engine has used it for %v; its place goes to %s", s.cfg.Unused, n.facts.ID())
		err = errors.Join(old.close(), s.remove(old.facts, "another namespace has its place"))
		s.mu.Lock()
		delete(s.mu.leaving, old.facts)
		s.mu.Unlock()
	}
	if err == nil {
		err = n.open()
	}
	_ = s.opened(n, err) // it was told
}

// refused takes note of a peer that was dropped.
func (s *Store) refused(identity, why string) {
	s.mu.Lock()
	s.mu.refused++
	s.mu.Unlock()
	s.note(Note{What: "peer_refused", Peer: printable(identity, 80), Bad: true, Text: why})
}

// printable is a peer's word for itself in a form that does no harm to a log.
func printable(s string, most int) string {
	if len(s) > most {
		s = s[:most] + "…"
	}
	return fmt.Sprintf("%+q", s)
}

func (s *Store) note(n Note) {
	if s.cfg.OnNote != nil {
		s.cfg.OnNote(n)
	}
}

// all is the namespaces there are, by place.
func (s *Store) all() []*namespace {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.mu.table), func(n *namespace) bool { return n == nil })
}

// Drain takes no more offers and waits until what is under way has ended, or ctx.
func (s *Store) Drain(ctx context.Context) {
	var all sync.WaitGroup
	for _, n := range s.all() {
		all.Go(func() { n.drain(ctx) })
	}
	all.Wait()
}

// Close ends all sessions and frees the memory; files stay. It waits for writes under way.
func (s *Store) Close() error {
	s.mu.Lock()
	first := !s.mu.closed
	s.mu.closed = true
	s.mu.Unlock()
	if !first {
		return nil
	}
	s.opening.Wait()
	var errs []error
	for _, n := range s.all() {
		errs = append(errs, n.close())
		s.leave(n)
	}
	return errors.Join(append(errs, s.front.Close())...)
}

// Stats counts.
func (s *Store) Stats() Stats {
	var out Stats
	for _, n := range s.all() {
		out.Namespaces = append(out.Namespaces, n.stats())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Refused = s.mu.refused
	return out
}
