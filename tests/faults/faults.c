/* Preloaded: counts the calls that change a folder, and lets the N-th of them, or all from the N-th on, go wrong.
 *
 * `fault_arm` starts it in a process that was forked; until then every call passes. The counters lie in memory that the
 * parent shares, so that they outlive a kill. Calls inside the C library itself (fopen) and stores into mapped files
 * are not seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { COUNT, KILL, FULL, BROKEN, READ_ONLY, VANISH, TERM, SLOW, CLOCK };      /* as FAULTS of harness.py */
enum { OPEN, WRITE, SYNC, RENAME, REMOVE, FOLDER, SIZE, KINDS };               /* as CALLS of harness.py */
struct counters { _Atomic long seen, hit, of[KINDS]; };

static struct counters *counters;
static char folder[4096];
static int fault, hidden; /* hidden: whether calls count that change nothing to be seen */
static long at;
static double amount; /* seconds */

void fault_arm(const char *path, int what, long number, double seconds, int all, void *shared) {
  snprintf(folder, sizeof folder, "%s", path);
  fault = what, at = number, amount = seconds, hidden = all;
  counters = shared;
}

static int inside(const char *path) {
  size_t length = strlen(folder);
  if (strncmp(path, folder, length) || (path[length] && path[length] != '/')) return 0;
  return hidden || !strstr(path + length, "/.");
}

static int path_inside(int base, const char *path) {
  char name[64], whole[8192];
  if (!counters || !path) return 0;
  if (path[0] == '/') return inside(path);
  if (base == AT_FDCWD) snprintf(name, sizeof name, "/proc/self/cwd");
  else snprintf(name, sizeof name, "/proc/self/fd/%d", base);
  ssize_t length = readlink(name, whole, 4000);
  if (length < 0) return 0;
  snprintf(whole + length, sizeof whole - length, "/%s", path);
  return inside(whole);
}

static int file_inside(int file) {
  char name[64], whole[4096];
  if (!counters) return 0;
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  ssize_t length = readlink(name, whole, sizeof whole - 1);
  if (length < 0) return 0;
  whole[length] = 0;
  return inside(whole);
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

/* The error of this call, 0 for none, or -1 for a write of which half is written. A kill does not return but for -1. */
static int strike(int call) {
  if (call == SYNC && !hidden) return 0;
  long now = atomic_fetch_add(&counters->seen, 1) + 1;
  atomic_fetch_add(&counters->of[call], 1);
  if (fault == SLOW) { usleep((useconds_t)(1e6 * amount)); return 0; }
  if (fault == COUNT || now < at) return 0;
  if (now > at && fault != FULL && fault != READ_ONLY) return 0;
  long hits = atomic_fetch_add(&counters->hit, 1);
  switch (fault) {
    case KILL: if (call == WRITE) return -1; die(); break;
    case FULL:
      if (call == WRITE) return hits ? ENOSPC : -1;
      return call == OPEN || call == FOLDER || call == SIZE ? ENOSPC : 0;
    case BROKEN: return EIO;
    case READ_ONLY: return call == WRITE || call == SYNC ? EIO : EROFS;
    case VANISH: {
      char gone[4200];
      snprintf(gone, sizeof gone, "%s.gone", folder);
      int (*move)(const char *, const char *) = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
      move(folder, gone);
      break;
    }
    case TERM: kill(getpid(), SIGTERM); usleep(200000); break; /* it is heard in this call */
  }
  return 0;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(inside, call, back) do { \
  int e = (inside) ? strike(call) : 0; \
  if (e > 0) return errno = e, (back); \
} while (0)

static int writes(int flags) { return flags & (O_CREAT | O_TRUNC); }
#define OPENS(name, base, ...) \
  mode_t mode = 0; \
  if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
    va_list more; \
    va_start(more, flags); \
    mode = va_arg(more, mode_t); \
    va_end(more); \
  } \
  REAL(name); \
  FAIL(writes(flags) && path_inside(base, path), OPEN, -1); \
  return real(__VA_ARGS__, flags, mode)
int open(const char *path, int flags, ...) { OPENS(open, AT_FDCWD, path); }
int open64(const char *path, int flags, ...) { OPENS(open64, AT_FDCWD, path); }
int openat(int base, const char *path, int flags, ...) { OPENS(openat, base, base, path); }
int openat64(int base, const char *path, int flags, ...) { OPENS(openat64, base, base, path); }

#define WRITES(part, ...) do { \
  if (file_inside(file)) { \
    int e = strike(WRITE); \
    if (e > 0) return errno = e, -1; \
    if (e < 0) { \
      ssize_t half = part; \
      if (fault == KILL) die(); \
      return half > 0 ? half : (errno = ENOSPC, -1); \
    } \
  } } while (0)
ssize_t write(int file, const void *data, size_t size) {
  REAL(write);
  WRITES(size < 2 ? 0 : real(file, data, size / 2));
  return real(file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t place) {
  REAL(pwrite);
  WRITES(size < 2 ? 0 : real(file, data, size / 2, place));
  return real(file, data, size, place);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t place) {
  REAL(pwrite64);
  WRITES(size < 2 ? 0 : real(file, data, size / 2, place));
  return real(file, data, size, place);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
  REAL(writev);
  WRITES(count < 2 ? 0 : real(file, parts, count / 2));
  return real(file, parts, count);
}
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t place) {
  REAL(pwritev);
  WRITES(count < 2 ? 0 : real(file, parts, count / 2, place));
  return real(file, parts, count, place);
}

int fsync(int file) { REAL(fsync); FAIL(file_inside(file), SYNC, -1); return real(file); }
int fdatasync(int file) { REAL(fdatasync); FAIL(file_inside(file), SYNC, -1); return real(file); }
int msync(void *start, size_t length, int flags) {
  REAL(msync);
  FAIL(counters, SYNC, -1);
  return real(start, length, flags);
}
int rename(const char *a, const char *b) {
  REAL(rename);
  FAIL(path_inside(AT_FDCWD, a) || path_inside(AT_FDCWD, b), RENAME, -1);
  return real(a, b);
}
int renameat(int p, const char *a, int q, const char *b) {
  REAL(renameat);
  FAIL(path_inside(p, a) || path_inside(q, b), RENAME, -1);
  return real(p, a, q, b);
}
int link(const char *a, const char *b) {
  REAL(link);
  FAIL(path_inside(AT_FDCWD, b), RENAME, -1);
  return real(a, b);
}
int unlink(const char *path) { REAL(unlink); FAIL(path_inside(AT_FDCWD, path), REMOVE, -1); return real(path); }
int unlinkat(int base, const char *path, int flags) {
  REAL(unlinkat);
  FAIL(path_inside(base, path), REMOVE, -1);
  return real(base, path, flags);
}
int rmdir(const char *path) { REAL(rmdir); FAIL(path_inside(AT_FDCWD, path), REMOVE, -1); return real(path); }
int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  FAIL(path_inside(AT_FDCWD, path), FOLDER, -1);
  return real(path, mode);
}
int mkdirat(int base, const char *path, mode_t mode) {
  REAL(mkdirat);
  FAIL(path_inside(base, path), FOLDER, -1);
  return real(base, path, mode);
}
int ftruncate(int file, off_t size) { REAL(ftruncate); FAIL(file_inside(file), SIZE, -1); return real(file, size); }
int ftruncate64(int file, off64_t size) {
  REAL(ftruncate64);
  FAIL(file_inside(file), SIZE, -1);
  return real(file, size);
}
int truncate(const char *path, off_t size) {
  REAL(truncate);
  FAIL(path_inside(AT_FDCWD, path), SIZE, -1);
  return real(path, size);
}
int truncate64(const char *path, off64_t size) {
  REAL(truncate64);
  FAIL(path_inside(AT_FDCWD, path), SIZE, -1);
  return real(path, size);
}
int posix_fallocate(int file, off_t from, off_t size) { /* returns its error */
  REAL(posix_fallocate);
  int e = file_inside(file) ? strike(SIZE) : 0;
  return e > 0 ? e : real(file, from, size);
}
int posix_fallocate64(int file, off64_t from, off64_t size) {
  REAL(posix_fallocate64);
  int e = file_inside(file) ? strike(SIZE) : 0;
  return e > 0 ? e : real(file, from, size);
}

static double jump(void) { /* of the calendar's clock; the monotonic ones never do */
  return fault == CLOCK && counters && atomic_load(&counters->seen) >= at ? amount : 0;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
  REAL(clock_gettime);
  int status = real(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += (time_t)jump();
  return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  REAL(gettimeofday);
  int status = real(now, zone);
  now->tv_sec += (time_t)jump();
  return status;
}
time_t time(time_t *to) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (to) *to = now.tv_sec;
  return now.tv_sec;
}
