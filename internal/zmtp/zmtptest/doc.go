// Package zmtptest is a network in memory for tests of programs that talk through zmtp, inside
// testing/synctest or not. Its connections are net.Pipe's: deadlines work, nothing is buffered, every wait
// is one that synctest understands.
package zmtptest
