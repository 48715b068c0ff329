package api

import "github.com/kvferry/kvferry/wire"

// tierOf is what child i of a request says to the CPU tier. Peers know one transaction by the ids that
// the request names: it is the first child's. The bounds are of all.
func (j *job) tierOf(i int) wire.P2PParams {
	p := j.tier
	if i > 0 {
		p.Decoder, p.Prefiller, p.Source = "", nil, nil
	}
	return p
}
