package geometry

import "fmt"

// Check reports whether KV can be moved between a rank of ours and one of a peer, both of the same
// position in their engines. stock says that the remote side is no kvferry: it must then also have
// our ratio of kernel blocks to logical ones, since a stock D ends on a completion whose sender has
// another (nixl-connector.md, H23). Strides and block counts may differ. Typed error:
// *MismatchError.
func Check(local, remote Layout, stock bool) error {
	for _, n := range []struct {
		what          string
		local, remote int
		free          bool
	}{
		{"tensor-parallel size", local.TP, remote.TP, false},
		{"pipeline size", local.PP, remote.PP, false},
		{"kernel block size in tokens", local.BlockSize, remote.BlockSize, false},
		{"number of kernel blocks per logical block", local.Ratio, remote.Ratio, !stock},
		{"number of regions", len(local.Regions), len(remote.Regions), false},
	} {
		if n.local != n.remote && !n.free {
			return &MismatchError{n.what, fmt.Sprint(n.local), fmt.Sprint(n.remote)}
		}
	}
	if local.Order != remote.Order {
		return &MismatchError{"memory order", fmt.Sprintf("%q", local.Order), fmt.Sprintf("%q", remote.Order)}
	}
	for i, r := range local.Regions {
		q := remote.Regions[i]
		if r.BlockLen != q.BlockLen {
			return &MismatchError{fmt.Sprintf("block length of region %d", i), fmt.Sprint(r.BlockLen), fmt.Sprint(q.BlockLen)}
		}
		if r.Name != "" && q.Name != "" && r.Name != q.Name {
			return &MismatchError{fmt.Sprintf("name of region %d", i), fmt.Sprintf("%q", r.Name), fmt.Sprintf("%q", q.Name)}
		}
	}
	return nil
}
