package shm

// child is another process of a test.
func child(string) int { return 2 }
