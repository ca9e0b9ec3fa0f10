// For LD_PRELOAD: moves the calendar's clock of a process by MOVED_CLOCK_SECONDS.
// The monotonic clock stays. (libfaketime breaks time.sleep or threads of Python.)
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long seconds;

// Before main(): nginx empties its environment.
__attribute__((constructor)) static void read_seconds() {
  const char *const text = getenv("MOVED_CLOCK_SECONDS");
  seconds = text ? atol(text) : 0;
}

extern "C" int clock_gettime(clockid_t clock, struct timespec *found) noexcept {
  const int code = syscall(SYS_clock_gettime, clock, found);
  if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    found->tv_sec += seconds;
  return code;
}

extern "C" int gettimeofday(struct timeval *found, void *) noexcept {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *found = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

extern "C" time_t time(time_t *found) noexcept {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
