/* A stand-in for the CUDA driver's library: the calls for virtual memory, over memory of the host.
 *
 * It computes nothing and has no timing. It lets code that calls the driver run across processes without a GPU, and it
 * is strict where the driver is: nothing works before cuInit; calls that need a context fail without one; sizes and
 * addresses are whole granules; a new mapping gives no access (SIGSEGV here); a place is mapped once; mappings are
 * unmapped whole, addresses freed whole and empty; memory lives while a process has a handle, a mapping or a descriptor
 * of it. New memory holds 0xA5. Work on a stream is done when the stream or context is synchronised and not before, so
 * that a caller that does not wait is found out.
 *
 * Every allocation is a memory file, so the kernel itself counts who still uses it. For tests, by environment:
 *   STANDIN_BYTES   memory of the device; counts what this process created and still has
 *   STANDIN_FAIL    "NAME:n:code" fails the n-th call of NAME with this code, "NAME:n:code:*" that one and all later;
 *                   several are parted by commas. standin_fail() sets the same from inside the process.
 *   STANDIN_UUID    a letter that makes this another device
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULE ((size_t)2 << 20)
#define UNDEFINED_BYTE 0xA5
#define EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef void *CUstream;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUhandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304, INVALID_HANDLE = 400, NOT_SUPPORTED = 801, UNKNOWN = 999
};
static const struct { CUresult code; const char *name; } names[] = {
    {OK, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN"},
};

/* `file` is the memory; handles and mappings of this process count its references. */
typedef struct { int file, references, is_created, is_shareable; size_t bytes; } Memory;
typedef struct Handle { struct Handle *next; CUhandle id; Memory *memory; } Handle;
typedef struct Mapping { struct Mapping *next; CUdeviceptr at; size_t bytes; Memory *memory; } Mapping;
typedef struct Reservation { struct Reservation *next; CUdeviceptr at; size_t bytes; } Reservation;
typedef struct Work { struct Work *next; CUdeviceptr at; size_t bytes; unsigned char value; } Work;
typedef struct Stream { struct Stream *next; Work *first, **last; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_initialised, context_references;
static char context_object;
static __thread CUcontext current;
static Handle *handles;
static Mapping *mappings;
static Reservation *reservations;
static Stream *streams;
static CUhandle newest_id = 0x5000;
static size_t created_bytes;

/* Failures on request */

#define FAILURES_MAX 16
static struct { char name[48]; long left; int code, is_lasting; } failures[FAILURES_MAX];
static int failure_count = -1;

EXPORT void standin_fail(const char *wishes) {
    failure_count = 0;
    for (const char *at = wishes; at && *at && failure_count < FAILURES_MAX; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        char star = 0;
        if (sscanf(at, "%47[^:]:%ld:%d:%c", failures[failure_count].name, &failures[failure_count].left,
                   &failures[failure_count].code, &star) >= 3) {
            failures[failure_count++].is_lasting = star == '*';
        }
    }
}

static CUresult failure_of(const char *name) {
    if (failure_count < 0) standin_fail(getenv("STANDIN_FAIL"));
    for (int i = 0; i < failure_count; i++) {
        if (strcmp(failures[i].name, name) || failures[i].left <= 0) continue;
        if (--failures[i].left == 0) {
            failures[i].left = failures[i].is_lasting;
            return failures[i].code;
        }
    }
    return OK;
}

/* Every call begins here: with the lock, after a failure on request, and not before cuInit. */
static CUresult begin(const char *name) {
    pthread_mutex_lock(&lock);
    CUresult failure = failure_of(name);
    return failure ? failure : is_initialised ? OK : NOT_INITIALIZED;
}
static CUresult end(CUresult result) { pthread_mutex_unlock(&lock); return result; }
#define BEGIN CUresult begun = begin(__func__); if (begun) return end(begun)
#define REFUSE_IF(condition, code) if (condition) return end(code)
#define BEGIN_AS(name) CUresult begun = begin(name); if (begun) return end(begun)

static size_t count_of(int what) {
    size_t count = 0;
    if (what == 0) for (Handle *one = handles; one; one = one->next) count++;
    if (what == 1) for (Mapping *one = mappings; one; one = one->next) count++;
    if (what == 2) for (Reservation *one = reservations; one; one = one->next) count++;
    if (what == 3) for (Stream *one = streams; one; one = one->next) count++;
    return count;
}
/* What this process has: handles, mappings, reservations, streams, references of the context, bytes it created. */
EXPORT void standin_counts(size_t counts[6]) {
    pthread_mutex_lock(&lock);
    for (int what = 0; what < 4; what++) counts[what] = count_of(what);
    counts[4] = context_references;
    counts[5] = created_bytes;
    pthread_mutex_unlock(&lock);
}

/* Device and context */

EXPORT CUresult cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    CUresult failure = failure_of("cuInit");
    REFUSE_IF(failure, failure);
    REFUSE_IF(flags, INVALID_VALUE);
    is_initialised = 1;
    return end(OK);
}
EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = NULL;
    if (failure_of("cuGetErrorName")) return INVALID_VALUE;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) *name = names[i].name;
    return *name ? OK : INVALID_VALUE;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    BEGIN;
    REFUSE_IF(ordinal, INVALID_DEVICE);
    *device = 0;
    return end(OK);
}
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    BEGIN;
    REFUSE_IF(device, INVALID_DEVICE);
    *value = attribute == 102 || attribute == 103;
    return end(OK);
}
EXPORT CUresult cuDeviceGetUuid_v2(char uuid[16], CUdevice device) {
    BEGIN_AS("cuDeviceGetUuid");
    REFUSE_IF(device, INVALID_DEVICE);
    const char *letter = getenv("STANDIN_UUID");
    memset(uuid, letter && *letter ? *letter : 'S', 16);
    return end(OK);
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    BEGIN;
    REFUSE_IF(device, INVALID_DEVICE);
    context_references++;
    *context = &context_object;
    return end(OK);
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    BEGIN_AS("cuDevicePrimaryCtxRelease");
    REFUSE_IF(device, INVALID_DEVICE);
    REFUSE_IF(!context_references, INVALID_CONTEXT);
    context_references--;
    return end(OK);
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { BEGIN; *context = current; return end(OK); }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    BEGIN;
    REFUSE_IF(context && (context != &context_object || !context_references), INVALID_CONTEXT);
    current = context;
    return end(OK);
}

/* Work */

static int is_context_missing(void) { return !current || !context_references; }
static Stream *stream_of(CUstream wanted) {
    for (Stream *one = streams; one; one = one->next) if (one == wanted) return one;
    return NULL;
}
static void finish(Stream *stream) {
    while (stream->first) {
        Work *work = stream->first;
        memset((void *)work->at, work->value, work->bytes); /* a fault here: the caller unmapped without waiting */
        stream->first = work->next;
        free(work);
    }
    stream->last = &stream->first;
}
EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    BEGIN;
    REFUSE_IF(is_context_missing(), INVALID_CONTEXT);
    REFUSE_IF(flags > 1, INVALID_VALUE);
    Stream *made = calloc(1, sizeof *made);
    made->last = &made->first;
    made->next = streams;
    *stream = streams = made;
    return end(OK);
}
EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    BEGIN_AS("cuStreamDestroy");
    Stream *found = stream_of(stream);
    REFUSE_IF(!found, INVALID_HANDLE);
    finish(found);
    for (Stream **link = &streams; *link; link = &(*link)->next) if (*link == found) { *link = found->next; break; }
    free(found);
    return end(OK);
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    BEGIN;
    REFUSE_IF(is_context_missing(), INVALID_CONTEXT);
    Stream *found = stream_of(stream);
    REFUSE_IF(!found, INVALID_HANDLE);
    finish(found);
    return end(OK);
}
EXPORT CUresult cuCtxSynchronize(void) {
    BEGIN;
    REFUSE_IF(is_context_missing(), INVALID_CONTEXT);
    for (Stream *one = streams; one; one = one->next) finish(one);
    return end(OK);
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
    BEGIN;
    REFUSE_IF(is_context_missing(), INVALID_CONTEXT);
    Stream *found = stream_of(stream);
    REFUSE_IF(!found, INVALID_HANDLE);
    Work *work = calloc(1, sizeof *work);
    *work = (Work){NULL, at, bytes, value};
    *found->last = work;
    found->last = &work->next;
    return end(OK);
}

/* Memory */

static size_t device_bytes(void) {
    const char *bytes = getenv("STANDIN_BYTES");
    return bytes ? strtoull(bytes, NULL, 0) : (size_t)1 << 30;
}
static CUresult problem_with(const CUmemAllocationProp *properties) {
    if (!properties || properties->type != 1 || properties->location.type != 1) return INVALID_VALUE;
    if (properties->win32HandleMetaData) return INVALID_VALUE;
    return properties->location.id ? INVALID_DEVICE : OK;
}
static Handle *handle_of(CUhandle id) {
    for (Handle *one = handles; one; one = one->next) if (one->id == id) return one;
    return NULL;
}
static CUhandle new_handle(Memory *memory) {
    Handle *made = calloc(1, sizeof *made);
    *made = (Handle){handles, ++newest_id, memory};
    handles = made;
    memory->references++;
    return made->id;
}
static void drop(Memory *memory) {
    if (--memory->references) return;
    if (memory->is_created) created_bytes -= memory->bytes;
    close(memory->file);
    free(memory);
}
static int undefined_file(size_t bytes) {
    int file = memfd_create("standin-memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return -1;
    void *content = ftruncate(file, bytes) ? MAP_FAILED : mmap(NULL, bytes, PROT_WRITE, MAP_SHARED, file, 0);
    if (content == MAP_FAILED) { close(file); return -1; }
    memset(content, UNDEFINED_BYTE, bytes);
    munmap(content, bytes);
    fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    return file;
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties, int option) {
    BEGIN;
    CUresult problem = problem_with(properties);
    REFUSE_IF(problem, problem);
    REFUSE_IF(option != 0 && option != 1, INVALID_VALUE);
    *bytes = GRANULE;
    return end(OK);
}
EXPORT CUresult cuMemCreate(CUhandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags) {
    BEGIN;
    CUresult problem = problem_with(properties);
    REFUSE_IF(problem, problem);
    REFUSE_IF(!bytes || bytes % GRANULE || flags, INVALID_VALUE);
    REFUSE_IF(created_bytes + bytes > device_bytes(), OUT_OF_MEMORY);
    int file = undefined_file(bytes);
    REFUSE_IF(file < 0, OUT_OF_MEMORY);
    Memory *memory = calloc(1, sizeof *memory);
    *memory = (Memory){file, 0, 1, properties->requestedHandleTypes == 1, bytes};
    created_bytes += bytes;
    *handle = new_handle(memory);
    return end(OK);
}
EXPORT CUresult cuMemRelease(CUhandle id) {
    BEGIN;
    Handle *found = handle_of(id);
    REFUSE_IF(!found, INVALID_VALUE);
    for (Handle **link = &handles; *link; link = &(*link)->next) if (*link == found) { *link = found->next; break; }
    drop(found->memory);
    free(found);
    return end(OK);
}
EXPORT CUresult cuMemExportToShareableHandle(int *descriptor, CUhandle id, int kind, unsigned long long flags) {
    BEGIN;
    Handle *found = handle_of(id);
    REFUSE_IF(!found || kind != 1 || flags || !found->memory->is_shareable, INVALID_VALUE);
    int made = dup(found->memory->file); /* without close-on-exec: a caller must see to that itself */
    REFUSE_IF(made < 0, OPERATING_SYSTEM);
    *descriptor = made;
    return end(OK);
}
EXPORT CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *descriptor, int kind) {
    BEGIN;
    REFUSE_IF(kind != 1, INVALID_VALUE);
    int file = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0);
    struct stat status;
    int is_ours = file >= 0 && !fstat(file, &status) && fcntl(file, F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_GROW);
    if (!is_ours && file >= 0) close(file);
    REFUSE_IF(!is_ours, INVALID_VALUE);
    Memory *memory = calloc(1, sizeof *memory);
    *memory = (Memory){file, 0, 0, 1, (size_t)status.st_size};
    *handle = new_handle(memory);
    return end(OK);
}

/* Addresses */

static Mapping *mapping_in(CUdeviceptr at, size_t bytes) {
    for (Mapping *one = mappings; one; one = one->next) if (one->at < at + bytes && at < one->at + one->bytes) return one;
    return NULL;
}
/* Whether these addresses are whole mappings without a gap. */
static int is_mapped_whole(CUdeviceptr at, size_t bytes) {
    size_t sum = 0;
    for (Mapping *one = mappings; one; one = one->next) {
        if (one->at >= at + bytes || at >= one->at + one->bytes) continue;
        if (one->at < at || one->at + one->bytes > at + bytes) return 0;
        sum += one->bytes;
    }
    return bytes && sum == bytes;
}
static void *without_access(void *at, size_t bytes, int fixed) {
    return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    BEGIN;
    REFUSE_IF(!bytes || bytes % GRANULE || flags || wish || (alignment & (alignment - 1)), INVALID_VALUE);
    size_t step = alignment > GRANULE ? alignment : GRANULE;
    char *base = without_access(NULL, bytes + step, 0);
    REFUSE_IF(base == MAP_FAILED, OUT_OF_MEMORY);
    char *first = (char *)(((uintptr_t)base + step - 1) / step * step);
    if (first > base) munmap(base, first - base);
    munmap(first + bytes, base + step - first);
    Reservation *made = calloc(1, sizeof *made);
    *made = (Reservation){reservations, (CUdeviceptr)first, bytes};
    reservations = made;
    *at = made->at;
    return end(OK);
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
    BEGIN;
    REFUSE_IF(mapping_in(at, bytes), INVALID_VALUE);
    for (Reservation **link = &reservations; *link; link = &(*link)->next) {
        Reservation *one = *link;
        if (one->at != at || one->bytes != bytes) continue;
        *link = one->next;
        free(one);
        munmap((void *)at, bytes);
        return end(OK);
    }
    return end(INVALID_VALUE);
}
EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUhandle id, unsigned long long flags) {
    BEGIN;
    Handle *found = handle_of(id);
    Reservation *inside = reservations;
    while (inside && (at < inside->at || at + bytes > inside->at + inside->bytes)) inside = inside->next;
    REFUSE_IF(!found || offset || flags || at % GRANULE || !inside, INVALID_VALUE);
    REFUSE_IF(bytes != found->memory->bytes || mapping_in(at, bytes), INVALID_VALUE);
    void *mapped = mmap((void *)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->memory->file, 0);
    REFUSE_IF(mapped == MAP_FAILED, OUT_OF_MEMORY);
    Mapping *made = calloc(1, sizeof *made);
    *made = (Mapping){mappings, at, bytes, found->memory};
    mappings = made;
    found->memory->references++;
    return end(OK);
}
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
    BEGIN;
    Mapping *found = mapping_in(at, bytes);
    REFUSE_IF(!found || found->at != at || found->bytes != bytes, INVALID_VALUE);
    for (Mapping **link = &mappings; *link; link = &(*link)->next) if (*link == found) { *link = found->next; break; }
    drop(found->memory);
    free(found);
    without_access((void *)at, bytes, MAP_FIXED);
    return end(OK);
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    BEGIN;
    REFUSE_IF(!access || count != 1 || access->location.type != 1, INVALID_VALUE);
    REFUSE_IF(access->location.id, INVALID_DEVICE);
    REFUSE_IF(!is_mapped_whole(at, bytes), INVALID_VALUE);
    int allowed = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags == 1 ? PROT_READ : PROT_NONE;
    return end(mprotect((void *)at, bytes, allowed) ? UNKNOWN : OK);
}

/* For tests: let go of everything, as the end of the process would. */
EXPORT void standin_reset(void) {
    standin_fail("");
    while (streams) { while (streams->first) { Work *gone = streams->first; streams->first = gone->next; free(gone); } cuStreamDestroy_v2(streams); }
    while (mappings) cuMemUnmap(mappings->at, mappings->bytes);
    while (reservations) cuMemAddressFree(reservations->at, reservations->bytes);
    while (handles) cuMemRelease(handles->id);
    context_references = 0;
    current = NULL;
}
