//go:build soak

package fs

const kills = 100
