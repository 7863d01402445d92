/* A machine whose clock is set again and again, and whose disk is slow: LD_PRELOAD of every process of a run.

   Every two seconds, at the same moments for all processes, the wall clock jumps: half an hour ahead, an hour
   ahead, two hours back.
   Each write to a file below $SLOW_FOLDER, and each fsync of one, takes $SLOW_MS milliseconds more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int (*real_clock)(clockid_t, struct timespec *);

static long offset(void) {
    static const long jumps[] = {1800, 3600, -7200};
    struct timespec now;
    if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    real_clock(CLOCK_MONOTONIC, &now);
    return jumps[now.tv_sec / 2 % 3];
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    long jump = offset();
    int result = real_clock(clock, time);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += jump;
    return result;
}

int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

static void slow(int file) {
    const char *folder = getenv("SLOW_FOLDER"), *ms = getenv("SLOW_MS");
    char link[64], path[PATH_MAX + 1];
    if (!folder || !ms) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length <= 0) return;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) == 0) usleep(1000 * atoi(ms));
}

#define SLOW(type, name, arguments, given)                                        \
    type name arguments {                                                         \
        static type(*real) arguments;                                             \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                \
        slow(file);                                                               \
        return real given;                                                        \
    }

SLOW(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
SLOW(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count))
SLOW(ssize_t, pwrite, (int file, const void *data, size_t size, off_t place), (file, data, size, place))
SLOW(int, fsync, (int file), (file))
SLOW(int, fdatasync, (int file), (file))
