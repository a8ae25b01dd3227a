/* Makes the N-th change to the disk below one folder fail, or ends the process there.
 *
 * LD_PRELOAD loads it into the Python that runs the scenarios. It does nothing until the forked child calls `shim_arm`
 * through ctypes. The parent reads the counters from shared memory after the child has ended. Calls that synchronise
 * with the disk are counted but not made: no test turns the power off, and the calls would wait for other programs.
 *
 * If SPARKFORGE_ROBUSTNESS_SHARED names a file, the shared memory is that file, and `shim_arm` can also arm the programs
 * that the child starts: their calls are counted with the child's, and a kill ends all of them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum kind {
    OPEN_READ, OPEN_WRITE, READ, WRITE, SYNC, RENAME, UNLINK, RMDIR, MKDIR, LINK, TRUNCATE, CHMOD, LISTDIR, KINDS
};
enum mode {
    COUNT,     /* only count */
    ONCE,      /* the N-th call fails with `error` */
    ONWARDS,   /* the N-th call and every later one that needs room fails with `error` */
    SHORT,     /* the N-th call writes half, and the next one fails with `error`; other kinds fail at once */
    KILL,      /* SIGKILL instead of the N-th call */
    TORN       /* the N-th call writes half, then SIGKILL; other kinds are carried out, then SIGKILL */
};

struct shared {
    long calls;              /* how many calls were counted */
    long tripped;            /* the kind of the call that failed, -1: none did */
    char path[512];          /* of that call, if known */
    unsigned char kinds[1 << 20]; /* the kind of each counted call */
    int programs;            /* 1: programs that the child starts are armed too */
    int mode;                /* for them */
    long wanted;
    int error_number;
    char root[PATH_MAX];
};

#define FILES 65536
static struct shared *shared;
static char root[PATH_MAX];
static size_t root_length;
static int mode = -1;       /* -1: not armed */
static long wanted;
static int error_number;
static unsigned char below[FILES]; /* 1: the descriptor was opened below the folder */
static int half_written;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

static void arm(void) {
    strncpy(root, shared->root, sizeof root - 1);
    root_length = strlen(root);
    wanted = shared->wanted;
    error_number = shared->error_number;
    half_written = 0;
    mode = shared->mode;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SPARKFORGE_ROBUSTNESS_SHARED");
    int file = path ? REAL(open64)(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file >= 0 && REAL(ftruncate64)(file, sizeof *shared) != 0) abort();
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
    if (shared == MAP_FAILED) abort();
    if (shared->programs) arm();
}

struct shared *shim_shared(void) {
    return shared;
}

void shim_arm(const char *folder, int how, long number, int with, int programs) {
    strncpy(shared->root, folder, sizeof shared->root - 1);
    shared->wanted = number;
    shared->error_number = with;
    shared->mode = how;
    shared->programs = programs;
    shared->calls = 0;
    shared->tripped = -1;
    shared->path[0] = 0;
    arm();
}

void shim_disarm(void) {
    shared->programs = 0;
    mode = -1;
}

static int is_below(int directory, const char *path) {
    char folder[PATH_MAX];
    if (mode < 0 || path == NULL) return 0;
    if (path[0] != '/') {
        if (directory != AT_FDCWD) return directory >= 0 && directory < FILES && below[directory];
        if (getcwd(folder, sizeof folder) == NULL) return 0;
        path = folder;
    }
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int descriptor_is_below(int file) {
    return mode >= 0 && file >= 0 && file < FILES && below[file];
}

static void end(void) {
    kill(shared->programs ? 0 : getpid(), SIGKILL); /* 0: the process group of the child and its programs */
}

/* Count a call. Returns 0: make it, 1: fail with errno set, 2: make half of it. */
static int trip(enum kind kind, const char *path) {
    long number = __atomic_add_fetch(&shared->calls, 1, __ATOMIC_SEQ_CST);
    if (number <= (long)sizeof shared->kinds) shared->kinds[number - 1] = (unsigned char)kind;
    if (mode == COUNT) return 0;
    if (mode == SHORT && half_written && kind == WRITE) {
        half_written = 0;
        errno = error_number;
        return 1;
    }
    int later = mode == ONWARDS && number > wanted &&
        (kind == OPEN_WRITE || kind == WRITE || kind == MKDIR || kind == LINK || kind == SYNC);
    if (number != wanted && !later) return 0;
    if (number == wanted) {
        shared->tripped = kind;
        if (path) strncpy(shared->path, path, sizeof shared->path - 1);
        if (mode == KILL) end();
        if (mode == TORN) return 2;
        if (mode == SHORT && kind == WRITE) {
            half_written = 1;
            return 2;
        }
    }
    errno = error_number;
    return 1;
}

static void torn(void) {
    if (mode == TORN) end();
}

#define GUARDED(condition, kind, path, call)              \
    do {                                                  \
        int what = (condition) ? trip(kind, path) : 0;    \
        if (what == 1) return -1;                         \
        int result = call;                                \
        if (what == 2) { int saved = errno; torn(); errno = saved; } \
        return result;                                    \
    } while (0)

static int opened(int file, int inside) {
    if (file >= 0 && file < FILES) below[file] = (unsigned char)inside;
    return file;
}

static enum kind open_kind(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT ? OPEN_WRITE : OPEN_READ;
}

#define OPEN(name, directory, signature, call)                                   \
    int name signature {                                                         \
        mode_t permissions = 0;                                                  \
        if (flags & (O_CREAT | O_TMPFILE)) {                                     \
            va_list rest;                                                        \
            va_start(rest, flags);                                               \
            permissions = va_arg(rest, mode_t);                                  \
            va_end(rest);                                                        \
        }                                                                        \
        int inside = is_below(directory, path);                                  \
        int what = inside ? trip(open_kind(flags), path) : 0;                    \
        if (what == 1) return -1;                                                \
        int file = opened(call, inside);                                         \
        if (what == 2) torn();                                                   \
        return file;                                                             \
    }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), REAL(open)(path, flags, permissions))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), REAL(open64)(path, flags, permissions))
OPEN(openat, directory, (int directory, const char *path, int flags, ...), REAL(openat)(directory, path, flags, permissions))
OPEN(openat64, directory, (int directory, const char *path, int flags, ...), REAL(openat64)(directory, path, flags, permissions))

FILE *fopen64(const char *path, const char *how) {
    int inside = is_below(AT_FDCWD, path);
    if (inside && trip(strchr(how, 'r') && !strchr(how, '+') ? OPEN_READ : OPEN_WRITE, path) == 1) return NULL;
    FILE *file = REAL(fopen64)(path, how);
    if (file) opened(fileno(file), inside);
    return file;
}

int close(int file) {
    if (file >= 0 && file < FILES) below[file] = 0;
    return REAL(close)(file);
}

int dup2(int file, int other) {
    if (other >= 0 && other < FILES) below[other] = file >= 0 && file < FILES ? below[file] : 0;
    return REAL(dup2)(file, other);
}

#define WRITES(name, signature, call, half)                                      \
    ssize_t name signature {                                                     \
        int what = descriptor_is_below(file) ? trip(WRITE, NULL) : 0;            \
        if (what == 1) return -1;                                                \
        if (what == 2) {                                                         \
            ssize_t written = half;                                              \
            torn();                                                              \
            return written;                                                      \
        }                                                                        \
        return call;                                                             \
    }

WRITES(write, (int file, const void *data, size_t size), REAL(write)(file, data, size), REAL(write)(file, data, (size + 1) / 2))
WRITES(pwrite64, (int file, const void *data, size_t size, off64_t at), REAL(pwrite64)(file, data, size, at),
       REAL(pwrite64)(file, data, (size + 1) / 2, at))
WRITES(sendfile64, (int file, int from, off64_t *at, size_t size), REAL(sendfile64)(file, from, at, size),
       REAL(sendfile64)(file, from, at, (size + 1) / 2))

ssize_t copy_file_range(int from, off64_t *at, int file, off64_t *to, size_t size, unsigned flags) {
    if (descriptor_is_below(file) && trip(WRITE, NULL) == 1) return -1;
    return REAL(copy_file_range)(from, at, file, to, size, flags);
}

ssize_t read(int file, void *data, size_t size) {
    if (descriptor_is_below(file) && trip(READ, NULL) == 1) return -1;
    return REAL(read)(file, data, size);
}

ssize_t pread64(int file, void *data, size_t size, off64_t at) {
    if (descriptor_is_below(file) && trip(READ, NULL) == 1) return -1;
    return REAL(pread64)(file, data, size, at);
}

int fsync(int file) {
    GUARDED(descriptor_is_below(file), SYNC, NULL, 0);
}

int fdatasync(int file) {
    GUARDED(descriptor_is_below(file), SYNC, NULL, 0);
}

void sync(void) {}

int rename(const char *old, const char *new) {
    GUARDED(is_below(AT_FDCWD, old) || is_below(AT_FDCWD, new), RENAME, new, REAL(rename)(old, new));
}

int renameat(int from, const char *old, int to, const char *new) {
    GUARDED(is_below(from, old) || is_below(to, new), RENAME, new, REAL(renameat)(from, old, to, new));
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    GUARDED(is_below(from, old) || is_below(to, new), RENAME, new, REAL(renameat2)(from, old, to, new, flags));
}

int unlink(const char *path) {
    GUARDED(is_below(AT_FDCWD, path), UNLINK, path, REAL(unlink)(path));
}

int unlinkat(int directory, const char *path, int flags) {
    GUARDED(is_below(directory, path), flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, REAL(unlinkat)(directory, path, flags));
}

int rmdir(const char *path) {
    GUARDED(is_below(AT_FDCWD, path), RMDIR, path, REAL(rmdir)(path));
}

int mkdir(const char *path, mode_t permissions) {
    GUARDED(is_below(AT_FDCWD, path), MKDIR, path, REAL(mkdir)(path, permissions));
}

int mkdirat(int directory, const char *path, mode_t permissions) {
    GUARDED(is_below(directory, path), MKDIR, path, REAL(mkdirat)(directory, path, permissions));
}

int link(const char *old, const char *new) {
    GUARDED(is_below(AT_FDCWD, new), LINK, new, REAL(link)(old, new));
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    GUARDED(is_below(to, new), LINK, new, REAL(linkat)(from, old, to, new, flags));
}

int symlink(const char *target, const char *new) {
    GUARDED(is_below(AT_FDCWD, new), LINK, new, REAL(symlink)(target, new));
}

int truncate64(const char *path, off64_t size) {
    GUARDED(is_below(AT_FDCWD, path), TRUNCATE, path, REAL(truncate64)(path, size));
}

int ftruncate64(int file, off64_t size) {
    GUARDED(descriptor_is_below(file), TRUNCATE, NULL, REAL(ftruncate64)(file, size));
}

int chmod(const char *path, mode_t permissions) {
    GUARDED(is_below(AT_FDCWD, path), CHMOD, path, REAL(chmod)(path, permissions));
}

int fchmod(int file, mode_t permissions) {
    GUARDED(descriptor_is_below(file), CHMOD, NULL, REAL(fchmod)(file, permissions));
}

int fchmodat(int directory, const char *path, mode_t permissions, int flags) {
    GUARDED(is_below(directory, path), CHMOD, path, REAL(fchmodat)(directory, path, permissions, flags));
}

DIR *opendir(const char *path) {
    if (is_below(AT_FDCWD, path) && trip(LISTDIR, path) == 1) return NULL;
    return REAL(opendir)(path);
}

DIR *fdopendir(int file) {
    if (descriptor_is_below(file) && trip(LISTDIR, NULL) == 1) return NULL;
    return REAL(fdopendir)(file);
}
