/* Copies blocks of one buffer to another in a given order, once per line on stdin, and prints the
 * nanoseconds that it took. The yardstick of the benchmark: what a plain program needs. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int main(int argc, char **argv) {
	if (argc != 3) return 2;
	size_t blocks = strtoul(argv[1], 0, 10), size = strtoul(argv[2], 0, 10);
	char *src = 0, *dst = 0;
	unsigned *perm = calloc(blocks, sizeof *perm);
	if (posix_memalign((void **)&src, 4096, blocks * size) || posix_memalign((void **)&dst, 4096, blocks * size) || !perm)
		return 1;
	memset(src, 1, blocks * size);
	memset(dst, 2, blocks * size);
	for (size_t i = 0; i < blocks; i++)
		if (scanf("%u", &perm[i]) != 1 || perm[i] >= blocks) return 1;
	int c;
	while ((c = getchar()) != EOF) {
		if (c != 'g') continue;
		struct timespec a, b;
		clock_gettime(CLOCK_MONOTONIC, &a);
		for (size_t i = 0; i < blocks; i++)
			memcpy(dst + (size_t)perm[i] * size, src + i * size, size);
		clock_gettime(CLOCK_MONOTONIC, &b);
		printf("%lld\n", (long long)(b.tv_sec - a.tv_sec) * 1000000000ll + (b.tv_nsec - a.tv_nsec));
		fflush(stdout);
		src[0] = dst[(size_t)perm[0] * size]; /* the copies are needed */
	}
	return 0;
}
