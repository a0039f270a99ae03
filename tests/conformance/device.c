/* Devices, contexts, streams and events: as much as unmapping after the last use needs. */

#include "fake.h"
#include <stdlib.h>
#include <string.h>

enum { VMM_SUPPORTED = 102, POSIX_FD_SUPPORTED = 103, MAX_STREAMS = 16 };
static const uint64_t FIRST_CONTEXT = 0xc0de00, FIRST_STREAM = 0x57ea00;

static int initialized;
static int retained[MAX_DEVICES];          /* the primary contexts' use counts */
static _Thread_local int stack[16], depth; /* this thread's current devices */

/* stream 0, 1, 2: the default ones; what is queued there waits for blocking streams */
struct work { uint64_t stream, order, start, size; struct work *next; };
struct event { uint64_t stream, order; struct event *next; };
static struct work *queue;
static struct event *events;
static uint64_t next_order = 1;
static int num_streams, non_blocking[MAX_STREAMS];

int is_initialized(void) { return initialized; }
int is_device(int device) { return device >= 0 && (uint64_t)device < settings.devices; }
int reaches(int device, int owner) { return device == owner || settings.peers; }
int current_device(void) {
    return depth && retained[stack[depth - 1]] ? stack[depth - 1] : -1;
}

/* ---- devices ---- */

static int do_cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    initialized = 1;
    return SUCCESS;
}
API(cuInit, NOTHING, (unsigned flags), (flags))

static int do_cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
API(cuDriverGetVersion, NOTHING, (int *version), (version))

static int do_cuDeviceGetCount(int *count) { return *count = (int)settings.devices, SUCCESS; }
API(cuDeviceGetCount, DRIVER, (int *count), (count))

static int do_cuDeviceGet(int *device, int ordinal) {
    if (!is_device(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
API(cuDeviceGet, DRIVER, (int *device, int ordinal), (device, ordinal))

static int do_cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (!is_device(device)) return INVALID_DEVICE;
    *value = (attribute == VMM_SUPPORTED && settings.managed) || attribute == POSIX_FD_SUPPORTED;
    return SUCCESS;
}
API(cuDeviceGetAttribute, DRIVER, (int *value, int attribute, int device),
    (value, attribute, device))

static int do_cuDeviceCanAccessPeer(int *can, int device, int peer) {
    if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
    *can = device != peer && reaches(device, peer);
    return SUCCESS;
}
API(cuDeviceCanAccessPeer, DRIVER, (int *can, int device, int peer), (can, device, peer))

/* ---- contexts: the primary one of each device ---- */

static int do_cuDevicePrimaryCtxRetain(uint64_t *context, int device) {
    if (!is_device(device)) return INVALID_DEVICE;
    retained[device]++;
    *context = FIRST_CONTEXT + (uint64_t)device;
    return SUCCESS;
}
API(cuDevicePrimaryCtxRetain, DRIVER, (uint64_t *context, int device), (context, device))

static int do_cuDevicePrimaryCtxRelease(int device) {
    if (!is_device(device)) return INVALID_DEVICE;
    if (!retained[device]) return INVALID_CONTEXT;
    retained[device]--;
    return SUCCESS;
}
API(cuDevicePrimaryCtxRelease, DRIVER, (int device), (device))

static int do_cuCtxPushCurrent(uint64_t context) {
    if (context < FIRST_CONTEXT || !is_device((int)(context - FIRST_CONTEXT)) || depth == 16)
        return INVALID_CONTEXT;
    stack[depth++] = (int)(context - FIRST_CONTEXT);
    return SUCCESS;
}
API(cuCtxPushCurrent, DRIVER, (uint64_t context), (context))

static int do_cuCtxPopCurrent(uint64_t *context) {
    if (!depth) return INVALID_CONTEXT;
    *context = FIRST_CONTEXT + (uint64_t)stack[--depth];
    return SUCCESS;
}
API(cuCtxPopCurrent, DRIVER, (uint64_t *context), (context))

static int do_cuCtxGetCurrent(uint64_t *context) {
    *context = depth ? FIRST_CONTEXT + (uint64_t)stack[depth - 1] : 0;
    return SUCCESS;
}
API(cuCtxGetCurrent, DRIVER, (uint64_t *context), (context))

static int do_cuCtxGetDevice(int *device) { return *device = current_device(), SUCCESS; }
API(cuCtxGetDevice, CONTEXT, (int *device), (device))

/* ---- streams and events ---- */

static int is_stream(uint64_t stream) {
    return stream <= 2 || (stream >= FIRST_STREAM && stream < FIRST_STREAM + (uint64_t)num_streams);
}

/* Does work on `stream` come before what is put on `after` later? */
static int precedes(uint64_t stream, uint64_t after) {
    if (stream == after || (stream <= 2 && after <= 2)) return 1;
    uint64_t other = stream <= 2 ? after : stream;
    return (stream <= 2 || after <= 2) && !non_blocking[other - FIRST_STREAM];
}

static int is_pending(uint64_t stream, uint64_t order) {
    for (struct work *w = queue; w; w = w->next)
        if (precedes(w->stream, stream) && w->order <= order) return 1;
    return 0;
}

static void complete(uint64_t stream, uint64_t order) {
    for (struct work **link = &queue; *link;) {
        struct work *w = *link;
        if (precedes(w->stream, stream) && w->order <= order) {
            *link = w->next;
            free(w);
        } else {
            link = &w->next;
        }
    }
}

int is_in_use(uint64_t address, uint64_t size) {
    for (struct work *w = queue; w; w = w->next)
        if (w->start < address + size && address < w->start + w->size) return 1;
    return 0;
}

/* A kernel that reads these addresses; it runs until something waits for it. */
void launch(uint64_t stream, uint64_t start, uint64_t size) {
    struct work *work = malloc(sizeof *work);
    *work = (struct work){stream, next_order++, start, size, queue};
    queue = work;
}

static int do_cuStreamCreate(uint64_t *stream, unsigned flags) {
    if (!stream || flags > 1 || num_streams == MAX_STREAMS) return INVALID_VALUE;
    non_blocking[num_streams] = (int)flags;
    *stream = FIRST_STREAM + (uint64_t)num_streams++;
    return SUCCESS;
}
API(cuStreamCreate, CONTEXT, (uint64_t *stream, unsigned flags), (stream, flags))

static int do_cuCtxSynchronize(void) {
    while (queue) complete(queue->stream, UINT64_MAX);
    return SUCCESS;
}
API(cuCtxSynchronize, CONTEXT, (void), ())

static int do_cuEventCreate(struct event **event, unsigned flags) {
    if (!event || flags > 7) return INVALID_VALUE;
    *event = calloc(1, sizeof **event);
    (*event)->next = events;
    events = *event;
    return SUCCESS;
}
API(cuEventCreate, CONTEXT, (struct event **event, unsigned flags), (event, flags))

static struct event **find_event(struct event *event) {
    struct event **link = &events;
    while (*link && *link != event) link = &(*link)->next;
    return link;
}

static int do_cuEventRecord(struct event *event, uint64_t stream) {
    note("stream=%#lx", (unsigned long)stream);
    if (!*find_event(event) || !is_stream(stream)) return INVALID_HANDLE;
    event->stream = stream;
    event->order = next_order - 1;
    return SUCCESS;
}
API(cuEventRecord, CONTEXT, (struct event *event, uint64_t stream), (event, stream))

static int do_cuEventQuery(struct event *event) {
    if (!*find_event(event)) return INVALID_HANDLE;
    return is_pending(event->stream, event->order) ? NOT_READY : SUCCESS;
}
API(cuEventQuery, CONTEXT, (struct event *event), (event))

static int do_cuEventSynchronize(struct event *event) {
    if (!*find_event(event)) return INVALID_HANDLE;
    complete(event->stream, event->order);
    return SUCCESS;
}
API(cuEventSynchronize, CONTEXT, (struct event *event), (event))

static int do_cuEventDestroy(struct event *event) {
    struct event **link = find_event(event);
    if (!*link) return INVALID_HANDLE;
    *link = event->next;
    free(event);
    return SUCCESS;
}
API(cuEventDestroy, CONTEXT, (struct event *event), (event))

long count_device(const char *what) {
    long count = 0;
    if (!strcmp(what, "events"))
        for (struct event *e = events; e; e = e->next) count++;
    else if (!strcmp(what, "contexts"))
        for (int i = 0; i < MAX_DEVICES; i++) count += retained[i];
    else
        return -1;
    return count;
}
