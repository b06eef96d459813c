/* Moves the wall clock of one process: cc -shared -fPIC -O2 -o clock_shim.so clock_shim.c, then LD_PRELOAD.
 *
 * CHAOS_CLOCK_FILE names a file of three little-endian int64: offset in ns, drift in parts per million, and the
 * CLOCK_MONOTONIC time in ns from which the drift counts. Another process may change it at any time. Only
 * CLOCK_REALTIME moves: monotonic time, and so every time-out, stays true, as it does when an operator or NTP sets
 * a clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *told;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
  real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("CHAOS_CLOCK_FILE");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *page = mmap(NULL, 3 * sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (page != MAP_FAILED) told = page;
}

static void shift(struct timespec *ts) {
  if (!told) return;
  struct timespec mono;
  real_gettime(CLOCK_MONOTONIC, &mono);
  int64_t since = (int64_t)mono.tv_sec * 1000000000 + mono.tv_nsec - told[2];
  int64_t move = told[0] + (told[1] ? since / 1000000 * told[1] : 0);
  int64_t ns = (int64_t)ts->tv_sec * 1000000000 + ts->tv_nsec + move;
  ts->tv_sec = ns / 1000000000;
  ts->tv_nsec = ns % 1000000000;
}

int clock_gettime(clockid_t id, struct timespec *ts) {
  if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  int rc = real_gettime(id, ts);
  if (rc == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) shift(ts);
  return rc;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
  (void)tz;
  struct timespec ts;
  int rc = clock_gettime(CLOCK_REALTIME, &ts);
  if (rc == 0 && tv) { tv->tv_sec = ts.tv_sec; tv->tv_usec = ts.tv_nsec / 1000; }
  return rc;
}

time_t time(time_t *out) {
  struct timespec ts;
  if (clock_gettime(CLOCK_REALTIME, &ts) != 0) return -1;
  if (out) *out = ts.tv_sec;
  return ts.tv_sec;
}
