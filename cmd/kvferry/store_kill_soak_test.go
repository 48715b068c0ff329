//go:build soak

package main

const storeKills = 100
