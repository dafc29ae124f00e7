/* A wall clock that can be stepped, for the process that loads this by LD_PRELOAD and its children.
   The file in WALL_CLOCK_OFFSET has the seconds by which the clock is ahead. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t offset(void)
{
    static volatile int64_t *seconds;
    if (seconds == NULL) {
        const char *path = getenv("WALL_CLOCK_OFFSET");
        int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0)
            return 0;
        void *mapped = mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (mapped == MAP_FAILED)
            return 0;
        seconds = mapped;
    }
    return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    int failed = clock_gettime(CLOCK_REALTIME, &found);
    (void)zone;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *stored)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (stored != NULL)
        *stored = found.tv_sec;
    return found.tv_sec;
}
