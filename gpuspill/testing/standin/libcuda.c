/* A stand-in for libcuda.so.1 in host memory: the documented part of the driver API that moves memory. It runs no kernels.
 *
 * What it models, and what it makes visible:
 *
 *  - Device memory cannot be touched by the host: its addresses are mapped without access. New memory and freed memory hold
 *    poison. The lowest free address is given out first, so an address comes again at once.
 *  - Work is done late, by threads of its own, in an order that only streams, events and the default stream's rules bind;
 *    of what may be done next, any is. The legacy default stream waits for all blocking streams, and they for it.
 *  - Copies from pageable memory read it before the call returns; copies to it have ended when the call returns. Pinned
 *    memory is read and written when the copy is done.
 *  - Use of memory that is free, or was freed and given out again since the work was enqueued, is an error that sticks to
 *    the device, as CUDA_ERROR_ILLEGAL_ADDRESS does. So is a failed launch, and a device that is lost.
 *  - cuMemFree waits for the device. cuMemFreeAsync does not: it frees when the stream comes to it.
 *
 * The functions whose names begin with standin_ set it up, inject faults and tell counts. cuGetExportTable has nothing: its
 * tables are not documented, and CUDA's runtime library does without a device then.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) CUresult CUDAAPI
#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 4
#define WORKERS 3
#define ALIGNMENT 512ull
#define NEW_MEMORY 0xCB
#define FREED_MEMORY 0xDD
#define STREAM_MAGIC 0x53545245u
#define EVENT_MAGIC 0x45564e54u

typedef struct block { /* in the order of addresses, without gaps */
    size_t offset, nbytes, asked; /* of the arena; rounded; as asked for */
    int live;
    unsigned long generation; /* of what lives there now */
    struct op *ready;         /* allocated in the order of a stream: until then it may not be used */
    struct block *next;
} block;

struct device;
typedef struct context {
    struct device *device;
} context;

typedef struct stream {
    unsigned magic;
    struct device *device;
    int blocking; /* with the legacy default stream */
    struct op *last;
    struct stream *next;
} stream;

typedef struct event {
    unsigned magic;
    struct device *device;
    struct op *op; /* recorded last; NULL: never */
} event;

typedef struct device {
    int ordinal;
    char *base, *shadow; /* what the process sees, without access; where the bytes are */
    size_t nbytes;
    block *blocks;
    context primary;
    int retained;
    CUresult broken; /* sticks */
    stream legacy, *streams;
    char pool; /* its address is the handle of the default pool */
} device;

typedef struct end { /* one end of a copy, as it was when the copy was enqueued */
    char *address;
    block *block;
    unsigned long generation;
} end;

enum kind { NOTHING, COPY, FILL, RELEASE, CALL };
typedef struct op {
    enum kind kind;
    device *device;
    end to, from;
    size_t nbytes;
    unsigned value;
    void *staged;
    CUhostFn call;
    void *data;
    struct op **after; /* what has to be done before */
    int count, references, done, running, wanted;
    struct timespec due;
    struct op *next, *previous; /* in the list of what is not done */
} op;

typedef struct name { /* a function: its calls, and the faults injected into it */
    char text[48];
    long calls, skip, times;
    CUresult result;
    struct name *next;
} name;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* on the monotonic clock */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static device devices[MAX_DEVICES];
static int device_count, initialised, holding, driver_version = 13000;
static op *head, *tail;
static name *names;
static struct pinned { char *address; size_t nbytes; int allocated; struct pinned *next; } *pinned;
static unsigned long generations = 1, chance = 88172645463325252ul;
static long latency_ns = 100000;
static double bytes_per_second; /* 0: without limit */
static char violation[256], *marks;
static size_t marks_used;
static struct {
    long allocations, frees, copies_to_host, copies_to_device, copies_on_device, bytes_to_host, bytes_to_device;
    long waits, violations, streams, events, pinned_nbytes, pinned, host_touches;
    long pageable_copies, pageable_bytes; /* with host memory that is not pinned */
} counts;

static __thread CUcontext stack[32];
static __thread int depth, marked;
static __thread stream *per_thread[MAX_DEVICES];

/* -- setting up ------------------------------------------------------------------------------- */

static void *work(void *unused);

static size_t setting(const char *variable, size_t otherwise) {
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void set_up(void) {
    size_t nbytes = setting("STANDIN_MEMORY", 64ull << 20);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    device_count = (int)setting("STANDIN_DEVICES", 1);
    if (device_count > MAX_DEVICES) device_count = MAX_DEVICES;
    driver_version = (int)setting("STANDIN_VERSION", CUDA_VERSION);
    nbytes = (nbytes + 4095) & ~4095ull;
    for (int i = 0; i < device_count; i++) {
        device *d = &devices[i];
        int file = memfd_create("standin", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, (off_t)nbytes)) abort();
        d->ordinal = i;
        d->nbytes = nbytes;
        d->shadow = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        d->base = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (d->shadow == MAP_FAILED || d->base == MAP_FAILED) abort();
        close(file);
        d->blocks = calloc(1, sizeof *d->blocks);
        d->blocks->nbytes = nbytes;
        d->primary.device = d;
        d->legacy = (stream){.magic = STREAM_MAGIC, .device = d, .blocking = 1};
        d->streams = &d->legacy;
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, work, NULL);
        pthread_detach(thread);
    }
}

static name *named(const char *text) {
    for (name *found = names; found; found = found->next)
        if (!strcmp(found->text, text)) return found;
    name *made = calloc(1, sizeof *made);
    snprintf(made->text, sizeof made->text, "%s", text);
    made->next = names;
    return names = made;
}

/* Count a call, and return the fault that was injected for it. The lock is held. */
static CUresult called(name *function) {
    function->calls++;
    if (function->times && function->skip-- <= 0) {
        if (function->times > 0) function->times--;
        return function->result;
    }
    return CUDA_SUCCESS;
}

static device *current(void) { return depth ? ((context *)stack[depth - 1])->device : NULL; }

enum need { PLAIN = 0, INITIALISED = 1, CONTEXT = 3 };

static CUresult enter(name **slot, const char *text, enum need need) {
    pthread_once(&once, set_up);
    pthread_mutex_lock(&lock);
    if (!*slot) *slot = named(text);
    if (marked) {
        size_t length = strlen(text) + 1;
        marks = realloc(marks, marks_used + length + 1);
        marks_used += (size_t)sprintf(marks + marks_used, "%s ", text);
    }
    CUresult result = called(*slot);
    if (!result && need != PLAIN && !initialised) result = CUDA_ERROR_NOT_INITIALIZED;
    if (!result && need == CONTEXT) {
        device *d = current();
        result = d ? d->broken : CUDA_ERROR_INVALID_CONTEXT;
    }
    if (result) pthread_mutex_unlock(&lock);
    return result;
}

/* Every function begins so, with the lock held from there on, and ends with LEAVE. */
#define ENTER(need)                                          \
    static name *slot_;                                      \
    CUresult entered_ = enter(&slot_, __func__, need);       \
    if (entered_) return entered_
#define LEAVE(result)                   \
    do {                                \
        CUresult leave_ = (result);     \
        pthread_mutex_unlock(&lock);    \
        return leave_;                  \
    } while (0)

static CUresult violated(device *d, const char *what, const void *address) {
    counts.violations++;
    if (!violation[0]) snprintf(violation, sizeof violation, "%s at %p on device %d", what, address, d->ordinal);
    return d->broken = CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* -- memory ----------------------------------------------------------------------------------- */

static device *owner_of(const void *address) {
    for (int i = 0; i < device_count; i++)
        if ((char *)address >= devices[i].base && (char *)address < devices[i].base + devices[i].nbytes) return &devices[i];
    return NULL;
}

static block *block_at(device *d, const void *address) {
    size_t offset = (size_t)((char *)address - d->base);
    for (block *b = d->blocks; b; b = b->next)
        if (offset < b->offset + b->nbytes) return b;
    return NULL;
}

static struct pinned *pinned_at(const void *address) {
    for (struct pinned *p = pinned; p; p = p->next)
        if ((char *)address >= p->address && (char *)address < p->address + p->nbytes) return p;
    return NULL;
}

static block *give(device *d, size_t nbytes) {
    size_t rounded = (nbytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    for (block *b = d->blocks; b; b = b->next) {
        if (b->live || b->nbytes < rounded) continue;
        if (b->nbytes > rounded) {
            block *rest = calloc(1, sizeof *rest);
            rest->offset = b->offset + rounded;
            rest->nbytes = b->nbytes - rounded;
            rest->next = b->next;
            b->next = rest;
            b->nbytes = rounded;
        }
        b->live = 1;
        b->asked = nbytes;
        b->generation = ++generations;
        b->ready = NULL;
        memset(d->shadow + b->offset, NEW_MEMORY, rounded);
        counts.allocations++;
        return b;
    }
    return NULL;
}

static void drop(op *o);

static void take_back(device *d, block *b) {
    memset(d->shadow + b->offset, FREED_MEMORY, b->nbytes);
    b->live = 0;
    if (b->ready) drop(b->ready);
    b->ready = NULL;
    counts.frees++;
    for (block *at = d->blocks; at->next;) {
        block *next = at->next;
        if (at->live || next->live) {
            at = next;
            continue;
        }
        at->nbytes += next->nbytes;
        at->next = next->next;
        next->generation = 0; /* work that was enqueued for it refers to it still: it is not freed */
        next->nbytes = 0;
    }
}

/* -- work ------------------------------------------------------------------------------------- */

static void drop(op *o) {
    if (--o->references) return;
    free(o->staged);
    free(o);
}

static int after(const struct timespec *due) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > due->tv_sec || (now.tv_sec == due->tv_sec && now.tv_nsec >= due->tv_nsec);
}

static struct timespec in_ns(double nanoseconds) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += (time_t)(nanoseconds / 1e9);
    at.tv_nsec += (long)(nanoseconds - 1e9 * (double)(time_t)(nanoseconds / 1e9));
    if (at.tv_nsec >= 1000000000) at.tv_nsec -= 1000000000, at.tv_sec++;
    return at;
}

static void depend(op *o, op *on) {
    if (!on || on->done) return;
    o->after = realloc(o->after, sizeof *o->after * (size_t)(o->count + 1));
    on->references++;
    o->after[o->count++] = on;
}

static op *new_op(enum kind kind, device *d) {
    op *o = calloc(1, sizeof *o);
    o->kind = kind;
    o->device = d;
    o->references = 1; /* of the list */
    return o;
}

/* Enqueue on a stream, after all that has to be done before; the lock is held. */
static void enqueue(op *o, stream *s) {
    depend(o, s->last);
    if (s == &s->device->legacy) {
        for (stream *other = s->device->streams; other; other = other->next)
            if (other->blocking && other != s) depend(o, other->last);
    } else if (s->blocking) {
        depend(o, s->device->legacy.last);
    }
    if (s->last) drop(s->last);
    s->last = o;
    o->references++;
    o->due = in_ns((double)latency_ns);
    o->previous = tail;
    if (tail) tail->next = o;
    else head = o;
    tail = o;
    pthread_cond_broadcast(&changed);
}

static int is_ready(op *o) {
    for (int i = 0; i < o->count; i++)
        if (!o->after[i]->done) return 0;
    return !o->running && (!holding || o->wanted);
}

static void want(op *o) {
    if (o->done || o->wanted) return;
    o->wanted = 1;
    for (int i = 0; i < o->count; i++) want(o->after[i]);
}

static void wait_for(op *o) {
    if (!o || o->done) return;
    counts.waits++;
    o->references++;
    want(o);
    pthread_cond_broadcast(&changed);
    while (!o->done) pthread_cond_wait(&changed, &lock);
    drop(o);
}

static void wait_for_all(device *d) {
    for (op *o = head; o;) {
        if (o->device != d) {
            o = o->next;
            continue;
        }
        wait_for(o);
        o = head;
    }
}

/* Where the bytes of one end are; NULL, and an error that sticks, if they may not be used any more. */
static char *bytes_of(op *o, end *e) {
    device *d = owner_of(e->address);
    if (!d) return e->address;
    if (!e->block || !e->block->live || e->block->generation != e->generation) {
        violated(d, "memory was used after it was freed", e->address);
        return NULL;
    }
    if (e->block->ready && !e->block->ready->done) {
        violated(d, "memory was used before the stream that allocated it", e->address);
        return NULL;
    }
    (void)o;
    return d->shadow + (e->address - d->base);
}

static void execute(op *o) {
    static name *copy_fault;
    char *to = NULL, *from = NULL;
    if (o->kind == COPY || o->kind == FILL) {
        if (!copy_fault) copy_fault = named("copy");
        CUresult fault = called(copy_fault);
        if (fault) o->device->broken = fault;
        if (o->device->broken) return;
        to = bytes_of(o, &o->to);
        from = o->kind == FILL ? to : o->staged ? o->staged : bytes_of(o, &o->from);
        if (!to || !from) return;
    }
    if (o->kind == RELEASE) {
        device *d = owner_of(o->to.address);
        if (o->to.block->live && o->to.block->generation == o->to.generation) take_back(d, o->to.block);
        else violated(d, "memory was freed twice", o->to.address);
        return;
    }
    pthread_mutex_unlock(&lock);
    if (o->kind == COPY) {
        if (bytes_per_second > 0) {
            struct timespec until = in_ns(1e9 * (double)o->nbytes / bytes_per_second);
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        }
        memmove(to, from, o->nbytes);
    } else if (o->kind == FILL) {
        memset(to, (int)o->value, o->nbytes);
    } else if (o->kind == CALL) {
        o->call(o->data);
    }
    pthread_mutex_lock(&lock);
    /* Freed meanwhile, on another stream: what was copied is worth nothing. */
    if (o->kind == COPY || o->kind == FILL) {
        bytes_of(o, &o->to);
        if (o->kind == COPY && !o->staged) bytes_of(o, &o->from);
    }
}

/* Of what may be done now, any. */
static op *choose(struct timespec *next) {
    op *found = NULL;
    int many = 0, timed = 0;
    for (op *o = head; o; o = o->next) {
        if (!is_ready(o)) continue;
        if (!after(&o->due)) {
            if (!timed || o->due.tv_sec < next->tv_sec || (o->due.tv_sec == next->tv_sec && o->due.tv_nsec < next->tv_nsec))
                *next = o->due;
            timed = 1;
            continue;
        }
        chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
        if (!(chance % (unsigned long)++many)) found = o;
    }
    if (!timed) *next = in_ns(3.6e12);
    return found;
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct timespec next;
        op *o = choose(&next);
        if (!o) {
            pthread_cond_timedwait(&changed, &lock, &next);
            continue;
        }
        o->running = 1;
        execute(o);
        o->done = 1;
        for (int i = 0; i < o->count; i++) drop(o->after[i]);
        free(o->after);
        o->after = NULL;
        o->count = 0;
        if (o->previous) o->previous->next = o->next;
        else head = o->next;
        if (o->next) o->next->previous = o->previous;
        else tail = o->previous;
        drop(o);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

/* -- streams and copies ----------------------------------------------------------------------- */

static stream *new_stream(device *d, int blocking) {
    stream *s = calloc(1, sizeof *s);
    s->magic = STREAM_MAGIC;
    s->device = d;
    s->blocking = blocking;
    s->next = d->streams;
    d->streams = s;
    return s;
}

static stream *stream_of(CUstream handle) {
    device *d = current();
    if (handle == NULL || handle == CU_STREAM_LEGACY) return &d->legacy;
    if (handle == CU_STREAM_PER_THREAD) {
        if (!per_thread[d->ordinal]) per_thread[d->ordinal] = new_stream(d, 1);
        return per_thread[d->ordinal];
    }
    return ((stream *)handle)->magic == STREAM_MAGIC ? (stream *)handle : NULL;
}

static CUresult end_of(end *e, const void *address, size_t nbytes) {
    device *d = owner_of(address);
    e->address = (char *)address;
    if (!d) return CUDA_SUCCESS;
    e->block = block_at(d, address);
    e->generation = e->block->generation;
    if (!e->block->live) return violated(d, "memory was used that is not allocated", address);
    if ((char *)address + nbytes > d->base + e->block->offset + e->block->nbytes)
        return violated(d, "memory was used beyond its allocation", address);
    return CUDA_SUCCESS;
}

static CUresult copy(const void *to, const void *from, size_t nbytes, CUstream handle, int wait) {
    device *d = current();
    stream *s = stream_of(handle);
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    if (!nbytes) return CUDA_SUCCESS;
    op *o = new_op(COPY, d);
    CUresult result = end_of(&o->to, to, nbytes);
    if (!result) result = end_of(&o->from, from, nbytes);
    if (result) {
        free(o);
        return result;
    }
    o->nbytes = nbytes;
    if (!o->from.block && !o->to.block) {
        free(o);
        memmove((void *)to, from, nbytes);
        return CUDA_SUCCESS;
    }
    if (!o->from.block) {
        counts.copies_to_device++, counts.bytes_to_device += (long)nbytes;
        if (!pinned_at(from)) {
            counts.pageable_copies++, counts.pageable_bytes += (long)nbytes;
            o->staged = memcpy(malloc(nbytes), from, nbytes);
        }
    } else if (!o->to.block) {
        counts.copies_to_host++, counts.bytes_to_host += (long)nbytes;
        if (!pinned_at(to)) {
            counts.pageable_copies++, counts.pageable_bytes += (long)nbytes;
            wait = 1;
        }
    } else {
        counts.copies_on_device++;
    }
    o->references++;
    enqueue(o, s);
    if (wait) {
        wait_for(o);
        result = d->broken;
    }
    drop(o);
    return result;
}

static CUresult fill(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream handle) {
    stream *s = stream_of(handle);
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    if (!nbytes) return CUDA_SUCCESS;
    op *o = new_op(FILL, current());
    CUresult result = end_of(&o->to, (void *)to, nbytes);
    o->nbytes = nbytes;
    o->value = value;
    if (result) free(o);
    else enqueue(o, s);
    return result;
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) { ENTER(CONTEXT); LEAVE(copy((void *)to, from, n, NULL, 1)); }
API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) { ENTER(CONTEXT); LEAVE(copy(to, (void *)from, n, NULL, 1)); }
API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) { ENTER(CONTEXT); LEAVE(copy((void *)to, (void *)from, n, NULL, 0)); }
API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { ENTER(CONTEXT); LEAVE(copy((void *)to, (void *)from, n, NULL, 1)); }
API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s) { ENTER(CONTEXT); LEAVE(copy((void *)to, from, n, s, 0)); }
API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream s) { ENTER(CONTEXT); LEAVE(copy(to, (void *)from, n, s, 0)); }
API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { ENTER(CONTEXT); LEAVE(copy((void *)to, (void *)from, n, s, 0)); }
API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) { ENTER(CONTEXT); LEAVE(copy((void *)to, (void *)from, n, s, 0)); }
#if CUDA_VERSION >= 13000
API cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *n, size_t count, CUmemcpyAttributes *attributes,
                          size_t *first, size_t number, CUstream s) {
    ENTER(CONTEXT);
    CUresult result = CUDA_SUCCESS;
    (void)attributes, (void)first, (void)number;
    for (size_t i = 0; i < count && !result; i++) result = copy((void *)to[i], (void *)from[i], n[i], s, 0);
    LEAVE(result);
}
#endif
API cuMemsetD8_v2(CUdeviceptr to, unsigned char v, size_t n) { ENTER(CONTEXT); LEAVE(fill(to, v, n, NULL)); }
API cuMemsetD8Async(CUdeviceptr to, unsigned char v, size_t n, CUstream s) { ENTER(CONTEXT); LEAVE(fill(to, v, n, s)); }

API cuStreamCreateWithPriority(CUstream *s, unsigned flags, int priority) {
    ENTER(CONTEXT);
    (void)priority;
    *s = (CUstream)new_stream(current(), !(flags & CU_STREAM_NON_BLOCKING));
    counts.streams++;
    LEAVE(CUDA_SUCCESS);
}
API cuStreamCreate(CUstream *s, unsigned flags) { return cuStreamCreateWithPriority(s, flags, 0); }
API cuStreamDestroy_v2(CUstream handle) {
    ENTER(CONTEXT);
    stream *s = stream_of(handle);
    if (!s || handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    for (stream **at = &s->device->streams; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    if (s->last) drop(s->last);
    s->magic = 0; /* kept, so that later use of it shows */
    s->last = NULL;
    counts.streams--;
    LEAVE(CUDA_SUCCESS);
}
API cuStreamSynchronize(CUstream handle) {
    ENTER(CONTEXT);
    stream *s = stream_of(handle);
    if (!s) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    wait_for(s->last);
    if (s == &s->device->legacy)
        for (stream *other = s->device->streams; other; other = other->next)
            if (other->blocking) wait_for(other->last);
    LEAVE(s->device->broken);
}
API cuStreamQuery(CUstream handle) {
    ENTER(CONTEXT);
    stream *s = stream_of(handle);
    if (!s) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    LEAVE(s->last && !s->last->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}
API cuStreamWaitEvent(CUstream handle, CUevent e, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    stream *s = stream_of(handle);
    event *recorded = (event *)e;
    if (!s || !recorded || recorded->magic != EVENT_MAGIC) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    op *o = new_op(NOTHING, s->device);
    depend(o, recorded->op);
    enqueue(o, s);
    LEAVE(CUDA_SUCCESS);
}
API cuLaunchHostFunc(CUstream handle, CUhostFn call, void *data) {
    ENTER(CONTEXT);
    stream *s = stream_of(handle);
    if (!s) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    op *o = new_op(CALL, s->device);
    o->call = call;
    o->data = data;
    enqueue(o, s);
    LEAVE(CUDA_SUCCESS);
}

API cuEventCreate(CUevent *e, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    event *made = calloc(1, sizeof *made);
    made->magic = EVENT_MAGIC;
    made->device = current();
    *e = (CUevent)made;
    counts.events++;
    LEAVE(CUDA_SUCCESS);
}
static event *event_of(CUevent handle) {
    event *e = (event *)handle;
    return e && e->magic == EVENT_MAGIC ? e : NULL;
}
API cuEventDestroy_v2(CUevent handle) {
    static event *last[1024]; /* kept for a while, so that later use shows */
    static int at;
    ENTER(INITIALISED);
    event *e = event_of(handle);
    if (!e) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (e->op) drop(e->op);
    e->op = NULL;
    e->magic = 0;
    free(last[at]);
    last[at] = e;
    at = (at + 1) % 1024;
    counts.events--;
    LEAVE(CUDA_SUCCESS);
}
API cuEventRecord(CUevent handle, CUstream s_) {
    ENTER(CONTEXT);
    event *e = event_of(handle);
    stream *s = stream_of(s_);
    if (!e || !s) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    op *o = new_op(NOTHING, s->device);
    o->references++;
    enqueue(o, s);
    if (e->op) drop(e->op);
    e->op = o;
    LEAVE(CUDA_SUCCESS);
}
API cuEventRecordWithFlags(CUevent e, CUstream s, unsigned flags) { (void)flags; return cuEventRecord(e, s); }
API cuEventQuery(CUevent handle) {
    ENTER(INITIALISED);
    event *e = event_of(handle);
    if (!e) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (e->device->broken) LEAVE(e->device->broken);
    LEAVE(e->op && !e->op->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}
API cuEventSynchronize(CUevent handle) {
    ENTER(INITIALISED);
    event *e = event_of(handle);
    if (!e) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    wait_for(e->op);
    LEAVE(e->device->broken);
}

/* -- allocating ------------------------------------------------------------------------------- */

API cuMemAlloc_v2(CUdeviceptr *found, size_t nbytes) {
    ENTER(CONTEXT);
    if (!nbytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
    device *d = current();
    block *b = give(d, nbytes);
    if (!b) {
        /* What streams are going to free is free for this. */
        wait_for_all(d);
        b = give(d, nbytes);
    }
    if (!b) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    *found = (CUdeviceptr)(d->base + b->offset);
    LEAVE(CUDA_SUCCESS);
}
API cuMemFree_v2(CUdeviceptr address) {
    ENTER(CONTEXT);
    if (!address) LEAVE(CUDA_SUCCESS);
    device *d = owner_of((void *)address);
    if (!d) LEAVE(CUDA_ERROR_INVALID_VALUE);
    wait_for_all(d);
    block *b = block_at(d, (void *)address);
    if (!b->live || (char *)address != d->base + b->offset) {
        counts.violations++;
        if (!violation[0]) snprintf(violation, sizeof violation, "memory was freed twice at %p", (void *)address);
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    }
    take_back(d, b);
    LEAVE(d->broken);
}
API cuMemAllocAsync(CUdeviceptr *found, size_t nbytes, CUstream handle) {
    ENTER(CONTEXT);
    stream *s = stream_of(handle);
    if (!s) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!nbytes) LEAVE(CUDA_ERROR_INVALID_VALUE);
    device *d = s->device;
    block *b = give(d, nbytes);
    if (!b) {
        wait_for_all(d);
        b = give(d, nbytes);
    }
    if (!b) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    op *o = new_op(NOTHING, d);
    o->references++;
    enqueue(o, s);
    b->ready = o;
    *found = (CUdeviceptr)(d->base + b->offset);
    LEAVE(CUDA_SUCCESS);
}
API cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    ENTER(CONTEXT);
    stream *s = stream_of(handle);
    device *d = owner_of((void *)address);
    if (!s) LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (!d) LEAVE(CUDA_ERROR_INVALID_VALUE);
    op *o = new_op(RELEASE, d);
    CUresult result = end_of(&o->to, (void *)address, 0);
    if (result) {
        free(o);
        LEAVE(result);
    }
    enqueue(o, s);
    LEAVE(CUDA_SUCCESS);
}
API cuMemAllocFromPoolAsync(CUdeviceptr *found, size_t n, CUmemoryPool pool, CUstream s) { (void)pool; return cuMemAllocAsync(found, n, s); }
API cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice d) {
    ENTER(INITIALISED);
    *pool = (CUmemoryPool)&devices[d].pool;
    LEAVE(CUDA_SUCCESS);
}
API cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice d) { return cuDeviceGetDefaultMemPool(pool, d); }
API cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute a, void *value) { (void)pool, (void)a, (void)value; return CUDA_SUCCESS; }
API cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) { (void)keep; ENTER(INITIALISED); (void)pool; LEAVE(CUDA_SUCCESS); }
API cuMemGetInfo_v2(size_t *unused, size_t *total) {
    ENTER(CONTEXT);
    device *d = current();
    *total = d->nbytes;
    *unused = 0;
    for (block *b = d->blocks; b; b = b->next)
        if (!b->live) *unused += b->nbytes;
    LEAVE(CUDA_SUCCESS);
}
API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    ENTER(CONTEXT);
    device *d = owner_of((void *)address);
    block *b = d ? block_at(d, (void *)address) : NULL;
    if (!b || !b->live) LEAVE(CUDA_ERROR_NOT_FOUND);
    if (base) *base = (CUdeviceptr)(d->base + b->offset);
    if (nbytes) *nbytes = b->asked;
    LEAVE(CUDA_SUCCESS);
}

static void pin(char *address, size_t nbytes, int allocated) {
    struct pinned *p = calloc(1, sizeof *p);
    *p = (struct pinned){address, nbytes, allocated, pinned};
    pinned = p;
    counts.pinned++, counts.pinned_nbytes += (long)nbytes;
}
static CUresult unpin(void *address, int allocated) {
    for (int i = 0; i < device_count; i++) wait_for_all(&devices[i]); /* the list may change meanwhile */
    for (struct pinned **at = &pinned; *at; at = &(*at)->next) {
        struct pinned *p = *at;
        if (p->address != address || p->allocated != allocated) continue;
        *at = p->next;
        counts.pinned--, counts.pinned_nbytes -= (long)p->nbytes;
        if (allocated) free(address);
        free(p);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}
API cuMemHostAlloc(void **found, size_t nbytes, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    *found = aligned_alloc(4096, (nbytes + 4095) & ~4095ull);
    if (!*found) LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    pin(*found, nbytes, 1);
    LEAVE(CUDA_SUCCESS);
}
API cuMemAllocHost_v2(void **found, size_t nbytes) { return cuMemHostAlloc(found, nbytes, 0); }
API cuMemFreeHost(void *address) { ENTER(INITIALISED); LEAVE(unpin(address, 1)); }
API cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    if (pinned_at(address)) LEAVE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    pin(address, nbytes, 0);
    LEAVE(CUDA_SUCCESS);
}
API cuMemHostUnregister(void *address) { ENTER(INITIALISED); LEAVE(unpin(address, 0) ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS); }

/* -- devices and contexts --------------------------------------------------------------------- */

API cuInit(unsigned flags) {
    ENTER(PLAIN);
    (void)flags;
    if (!device_count) LEAVE(CUDA_ERROR_NO_DEVICE);
    initialised = 1;
    LEAVE(CUDA_SUCCESS);
}
API cuDriverGetVersion(int *version) { ENTER(PLAIN); *version = driver_version; LEAVE(CUDA_SUCCESS); }
API cuDeviceGetCount(int *count) { ENTER(INITIALISED); *count = device_count; LEAVE(CUDA_SUCCESS); }
API cuDeviceGet(CUdevice *d, int ordinal) {
    ENTER(INITIALISED);
    if (ordinal < 0 || ordinal >= device_count) LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *d = ordinal;
    LEAVE(CUDA_SUCCESS);
}
API cuDeviceGetName(char *text, int n, CUdevice d) { ENTER(INITIALISED); snprintf(text, (size_t)n, "Stand-in %d", d); LEAVE(CUDA_SUCCESS); }
API cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) {
    ENTER(INITIALISED);
    for (int i = 0; i < 16; i++) u->bytes[i] = (char)(i + 16 * d);
    LEAVE(CUDA_SUCCESS);
}
API cuDeviceGetUuid(CUuuid *u, CUdevice d) { return cuDeviceGetUuid_v2(u, d); }
API cuDeviceTotalMem_v2(size_t *nbytes, CUdevice d) { ENTER(INITIALISED); *nbytes = devices[d].nbytes; LEAVE(CUDA_SUCCESS); }
API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice d) {
    ENTER(INITIALISED);
    (void)d;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = (int)setting("STANDIN_POOLS", 1); break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = (int)setting("STANDIN_INTEGRATED", 0); break;
    default: *value = 0;
    }
    LEAVE(CUDA_SUCCESS);
}
API cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice d) {
    ENTER(INITIALISED);
    devices[d].retained++;
    *found = (CUcontext)&devices[d].primary;
    LEAVE(CUDA_SUCCESS);
}
API cuDevicePrimaryCtxRelease_v2(CUdevice d) {
    ENTER(INITIALISED);
    if (!devices[d].retained) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    devices[d].retained--;
    LEAVE(CUDA_SUCCESS);
}
API cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) {
    ENTER(INITIALISED);
    *flags = 0;
    *active = devices[d].retained > 0;
    LEAVE(CUDA_SUCCESS);
}
API cuDevicePrimaryCtxSetFlags_v2(CUdevice d, unsigned flags) { (void)d, (void)flags; ENTER(INITIALISED); LEAVE(CUDA_SUCCESS); }
static CUresult create(CUcontext *found, CUdevice d) {
    context *made = calloc(1, sizeof *made);
    if (d < 0 || d >= device_count || depth == 32) return CUDA_ERROR_INVALID_DEVICE;
    made->device = &devices[d];
    *found = stack[depth++] = (CUcontext)made;
    return CUDA_SUCCESS;
}
API cuCtxCreate_v2(CUcontext *c, unsigned flags, CUdevice d) { ENTER(INITIALISED); (void)flags; LEAVE(create(c, d)); }
#if CUDA_VERSION >= 13000
API cuCtxCreate_v4(CUcontext *c, CUctxCreateParams *parameters, unsigned flags, CUdevice d) {
    ENTER(INITIALISED);
    (void)parameters, (void)flags;
    LEAVE(create(c, d));
}
#endif
API cuCtxDestroy_v2(CUcontext c) {
    ENTER(INITIALISED);
    if (depth && stack[depth - 1] == c) depth--;
    LEAVE(CUDA_SUCCESS);
}
API cuCtxPushCurrent_v2(CUcontext c) {
    ENTER(INITIALISED);
    if (!c || depth == 32) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = c;
    LEAVE(CUDA_SUCCESS);
}
API cuCtxPopCurrent_v2(CUcontext *c) {
    ENTER(INITIALISED);
    if (!depth) LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (c) *c = stack[depth];
    LEAVE(CUDA_SUCCESS);
}
API cuCtxGetCurrent(CUcontext *c) { ENTER(INITIALISED); *c = depth ? stack[depth - 1] : NULL; LEAVE(CUDA_SUCCESS); }
API cuCtxSetCurrent(CUcontext c) {
    ENTER(INITIALISED);
    if (depth) depth--;
    if (c) stack[depth++] = c;
    LEAVE(CUDA_SUCCESS);
}
API cuCtxGetDevice(CUdevice *d) { ENTER(CONTEXT); *d = current()->ordinal; LEAVE(CUDA_SUCCESS); }
API cuCtxGetDevice_v2(CUdevice *d, CUcontext c) { ENTER(INITIALISED); *d = ((context *)c)->device->ordinal; LEAVE(CUDA_SUCCESS); }
API cuCtxGetApiVersion(CUcontext c, unsigned *version) { (void)c; ENTER(INITIALISED); *version = 3020; LEAVE(CUDA_SUCCESS); }
API cuCtxGetFlags(unsigned *flags) { ENTER(CONTEXT); *flags = 0; LEAVE(CUDA_SUCCESS); }
API cuCtxGetId(CUcontext c, unsigned long long *id) {
    ENTER(INITIALISED);
    *id = c ? 1ull + (unsigned)((context *)c)->device->ordinal : 1ull;
    LEAVE(CUDA_SUCCESS);
}
API cuCtxSynchronize(void) {
    ENTER(CONTEXT);
    device *d = current();
    wait_for_all(d);
    LEAVE(d->broken);
}

static CUresult pointer_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    device *d = owner_of((void *)address);
    block *b = d ? block_at(d, (void *)address) : NULL;
    struct pinned *p = pinned_at((void *)address);
    if (!(b && b->live) && !p) return CUDA_ERROR_INVALID_VALUE;
    if (p) d = &devices[0];
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = (CUcontext)&d->primary; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = p ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)value = p ? (void *)address : NULL; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = d->ordinal; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
API cuPointerGetAttribute(void *value, CUpointer_attribute a, CUdeviceptr p) { ENTER(INITIALISED); LEAVE(pointer_attribute(value, a, p)); }
API cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **values, CUdeviceptr p) {
    ENTER(INITIALISED);
    for (unsigned i = 0; i < n; i++)
        if (pointer_attribute(values[i], a[i], p)) {
            int eight = a[i] == CU_POINTER_ATTRIBUTE_CONTEXT || a[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || a[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER;
            if (eight) *(void **)values[i] = NULL;
            else *(int *)values[i] = a[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? -2 : 0;
        }
    LEAVE(CUDA_SUCCESS);
}

#define ERRORS(X)                                                                                                     \
    X(CUDA_SUCCESS) X(CUDA_ERROR_INVALID_VALUE) X(CUDA_ERROR_OUT_OF_MEMORY) X(CUDA_ERROR_NOT_INITIALIZED)             \
    X(CUDA_ERROR_NO_DEVICE) X(CUDA_ERROR_INVALID_DEVICE) X(CUDA_ERROR_INVALID_CONTEXT) X(CUDA_ERROR_ILLEGAL_ADDRESS)  \
    X(CUDA_ERROR_LAUNCH_FAILED) X(CUDA_ERROR_NOT_READY) X(CUDA_ERROR_INVALID_HANDLE) X(CUDA_ERROR_NOT_FOUND)          \
    X(CUDA_ERROR_DEVICE_UNAVAILABLE) X(CUDA_ERROR_SYSTEM_NOT_READY) X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)              \
    X(CUDA_ERROR_UNKNOWN) X(CUDA_ERROR_ECC_UNCORRECTABLE) X(CUDA_ERROR_DEINITIALIZED)
API cuGetErrorName(CUresult error, const char **text) {
#define NAME(e) if (error == e) { *text = #e; return CUDA_SUCCESS; }
    ERRORS(NAME)
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}
API cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }
API cuGetExportTable(const void **table, const CUuuid *id) { (void)id; *table = NULL; return CUDA_ERROR_NOT_FOUND; }
API cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    static const char *const suffixes[] = {"_v3", "_v2", ""};
    Dl_info self;
    void *library = dladdr((void *)&cuInit, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    char full[128];
    (void)flags;
    *function = NULL;
    /* The second version of these two came with CUDA 13; that of all others is older than what asks here. */
    int first = version < 13000 && (!strcmp(symbol, "cuCtxGetDevice") || !strcmp(symbol, "cuCtxSynchronize")) ? 2 : 0;
    for (int i = first; library && i < 3 && !*function; i++) {
        snprintf(full, sizeof full, "%s%s", symbol, suffixes[i]);
        *function = dlsym(library, full);
    }
    if (library) dlclose(library);
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (!*function && getenv("STANDIN_LOG")) fprintf(stderr, "stand-in: there is no %s\n", symbol);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
API cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) { return cuGetProcAddress_v2(symbol, function, version, flags, NULL); }

/* -- for tests -------------------------------------------------------------------------------- */

/* A count, by its name or that of a function; -1 if there is none. */
EXPORT long standin_count(const char *what) {
    long found = -1;
    pthread_once(&once, set_up);
    pthread_mutex_lock(&lock);
#define COUNT(field) if (!strcmp(what, #field)) found = counts.field;
    COUNT(allocations) COUNT(frees) COUNT(copies_to_host) COUNT(copies_to_device) COUNT(copies_on_device)
    COUNT(bytes_to_host) COUNT(bytes_to_device) COUNT(waits) COUNT(violations) COUNT(streams) COUNT(events)
    COUNT(pinned) COUNT(pinned_nbytes) COUNT(pageable_copies) COUNT(pageable_bytes)
    if (!strcmp(what, "live_bytes") || !strcmp(what, "live_allocations")) {
        found = 0;
        for (int i = 0; i < device_count; i++)
            for (block *b = devices[i].blocks; b; b = b->next)
                if (b->live) found += what[5] == 'b' ? (long)b->asked : 1;
    }
    if (!strcmp(what, "pending")) {
        found = 0;
        for (op *o = head; o; o = o->next) found++;
    }
    if (!strcmp(what, "contexts")) {
        found = 0;
        for (int i = 0; i < device_count; i++) found += devices[i].retained;
    }
    if (found < 0)
        for (name *n = names; n; n = n->next)
            if (!strcmp(n->text, what)) found = n->calls;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Copy a text: "violation", the first one; "marked", the calls of marked threads. */
EXPORT void standin_text(const char *what, char *to, long nbytes) {
    pthread_mutex_lock(&lock);
    snprintf(to, (size_t)nbytes, "%s", strcmp(what, "violation") ? (marks_used ? marks : "") : violation);
    pthread_mutex_unlock(&lock);
}

/* Record the calls of this thread from now on, or no more. */
EXPORT void standin_mark(int on) {
    marked = on;
    pthread_mutex_lock(&lock);
    if (on) marks_used = 0;
    pthread_mutex_unlock(&lock);
}

/* Let calls of a function ("copy": the doing of a copy) fail: so many (below zero: all), after some that do not. */
EXPORT void standin_fail(const char *function, int result, long skip, long times) {
    pthread_once(&once, set_up);
    pthread_mutex_lock(&lock);
    name *n = named(function);
    n->result = (CUresult)result;
    n->skip = skip;
    n->times = times;
    pthread_mutex_unlock(&lock);
}

/* Nanoseconds before work that was enqueued is done, and bytes a second of one copy (0: no limit). */
EXPORT void standin_speed(long nanoseconds, double bandwidth) {
    pthread_mutex_lock(&lock);
    latency_ns = nanoseconds;
    bytes_per_second = bandwidth;
    pthread_mutex_unlock(&lock);
}

/* Do only what a thread waits for, until it is switched off again. */
EXPORT void standin_hold(int on) {
    pthread_mutex_lock(&lock);
    holding = on;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Give back what is left, forget errors and faults; counts go on. For the time between two tests. */
EXPORT void standin_reset(void) {
    pthread_once(&once, set_up);
    pthread_mutex_lock(&lock);
    holding = 0;
    for (name *n = names; n; n = n->next) n->times = 0;
    for (int i = 0; i < device_count; i++) {
        wait_for_all(&devices[i]);
        devices[i].broken = CUDA_SUCCESS;
    }
    violation[0] = 0;
    counts.violations = 0;
    pthread_mutex_unlock(&lock);
}
