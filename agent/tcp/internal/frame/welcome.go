package frame

import "errors"

const welcomeFixed = 8 + 2 + 4 + 4 + 4

// Welcome answers a Hello.
//
//	magic 8 │ version 2 │ transfers 4 │ notif 4 │ notif bytes 4 │ name …
type Welcome struct {
	Transfers  int    // WRITEs that may be under way at once in this session
	Notif      int    // bytes of one notification
	NotifBytes int    // bytes of all notifications attached to WRITEs under way
	Name       string // of the listening agent
}

// errNoTransfers: a peer that takes no WRITE would keep ours waiting for ever.
var errNoTransfers = errors.New("peer permits no transfers")

// Append encodes.
func (w Welcome) Append(dst []byte) []byte {
	at := len(dst)
	dst = append(begin(dst, KindWelcome), magic[:]...)
	dst = le.AppendUint16(dst, Version)
	dst = le.AppendUint32(dst, uint32(w.Transfers))
	dst = le.AppendUint32(dst, uint32(w.Notif))
	dst = le.AppendUint32(dst, uint32(w.NotifBytes))
	return finish(append(dst, w.Name...), at)
}

// DecodeWelcome decodes the body.
func DecodeWelcome(b []byte) (Welcome, error) {
	if len(b) <= welcomeFixed {
		return Welcome{}, errShort
	}
	if err := checkMagic(b); err != nil {
		return Welcome{}, err
	}
	w := Welcome{
		Transfers: int(le.Uint32(b[10:])), Notif: int(le.Uint32(b[14:])), NotifBytes: int(le.Uint32(b[18:])),
		Name: string(b[welcomeFixed:]),
	}
	if w.Transfers < 1 {
		return Welcome{}, errNoTransfers
	}
	return w, checkName(w.Name)
}
