package geometry

// MaxRows bounds the descriptors of one prepared list: a row has 24 bytes, so a list stays below
// 1.6 GB, and every index fits 32 bits. 80 regions of 800,000 blocks are still below it.
const MaxRows = 1 << 26
