/* The way in: finding calls by name, counting them, failing one on demand, and the log. */

#include "fake.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct settings settings;

static struct call *calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_file;
static char details[256];
static int broken; /* a fault is told by every later call that needs the context */

/* The one failure to come: the countdown-th call whose name starts with prefix. */
static struct { char prefix[64]; long countdown; int code; } failure;

static const struct { int code; const char *name; } NAMES[] = {
    {SUCCESS, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"}, {UNKNOWN, "CUDA_ERROR_UNKNOWN"}};

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

void add(struct call *call) {
    call->next = calls;
    calls = call;
}

void kvalloc_fake_fail(const char *prefix, long countdown, int code) {
    snprintf(failure.prefix, sizeof failure.prefix, "%s", prefix);
    failure.countdown = countdown;
    failure.code = code;
}

__attribute__((constructor)) static void configure(void) {
    settings.memory = number("KVALLOC_FAKE_MEMORY", 64 << 20);
    settings.granularity = number("KVALLOC_FAKE_GRANULARITY", 2 << 20);
    settings.recommended = number("KVALLOC_FAKE_RECOMMENDED", settings.granularity);
    settings.addresses = number("KVALLOC_FAKE_ADDRESSES", (uint64_t)64 << 40);
    settings.devices = number("KVALLOC_FAKE_DEVICES", 1);
    settings.peers = number("KVALLOC_FAKE_PEERS", 1);
    settings.managed = number("KVALLOC_FAKE_VMM", 1);
    if (settings.devices > MAX_DEVICES) settings.devices = MAX_DEVICES;
    /* KVALLOC_FAKE_FAIL_AT=n, _FAIL_CALL=prefix of the names that count, _FAIL_CODE=status */
    const char *prefix = getenv("KVALLOC_FAKE_FAIL_CALL");
    kvalloc_fake_fail(prefix ? prefix : "", (long)number("KVALLOC_FAKE_FAIL_AT", 0),
                      (int)number("KVALLOC_FAKE_FAIL_CODE", UNKNOWN));
    /* KVALLOC_FAKE_LOG=path: one line per call - its name, arguments worth telling, status */
    const char *path = getenv("KVALLOC_FAKE_LOG");
    if (path) log_file = fopen(path, "a");
}

int enter(struct call *call, enum need need) {
    pthread_mutex_lock(&lock);
    details[0] = 0;
    call->count++;
    if (failure.countdown > 0 && !strncmp(call->name, failure.prefix, strlen(failure.prefix))
        && --failure.countdown == 0)
        return failure.code;
    if (need != NOTHING && !is_initialized()) return NOT_INITIALIZED;
    if (need == CONTEXT && broken) return broken;
    if (need == CONTEXT && current_device() < 0) return INVALID_CONTEXT;
    return SUCCESS;
}

int leave(struct call *call, int code) {
    if (code == ILLEGAL_ADDRESS) broken = code;
    if (log_file) {
        fprintf(log_file, "%s %s%s%d\n", call->name, details, details[0] ? " " : "", code);
        fflush(log_file);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

void note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(details, sizeof details, format, arguments);
    va_end(arguments);
}

/* handles, bytes, mappings, ranges, events, contexts: what is alive now;
 * a call's name: how often it was called; "": all calls together. */
long kvalloc_fake_count(const char *what) {
    pthread_mutex_lock(&lock);
    long count = count_pages(what);
    if (count < 0) count = count_mappings(what);
    if (count < 0) count = count_device(what);
    if (count < 0) {
        count = 0;
        for (struct call *call = calls; call; call = call->next)
            if (!what[0] || !strcmp(call->name, what)) count += call->count;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

/* Queue a kernel that reads some addresses. */
void kvalloc_fake_launch(uint64_t stream, uint64_t start, uint64_t size) {
    pthread_mutex_lock(&lock);
    launch(stream, start, size);
    pthread_mutex_unlock(&lock);
}

/* ---- outside the count: what CUDA lets one call at any time ---- */

static const char *name_of(int code) {
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (NAMES[i].code == code) return NAMES[i].name;
    return NULL;
}

int cuGetErrorName(int code, const char **name) {
    *name = name_of(code);
    return *name ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

/* The bindings ask here for every function. KVALLOC_FAKE_MISSING names one that is not there. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                        int *found) {
    const char *missing = getenv("KVALLOC_FAKE_MISSING");
    (void)flags;
    *function = NULL;
    if (!strcmp(symbol, "cuGetErrorName")) *function = (void *)cuGetErrorName;
    if (!strcmp(symbol, "cuGetErrorString")) *function = (void *)cuGetErrorString;
    if (!strcmp(symbol, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    /* since 13.0 cuCtxGetDevice and cuCtxSynchronize also come with a context argument */
    int other = version >= 13000 && !strncmp(symbol, "cuCtx", 5);
    for (struct call *call = calls; call && !other; call = call->next)
        if (!strcmp(call->name, symbol)) *function = call->function;
    if (missing && !strcmp(symbol, missing)) *function = NULL;
    if (found) *found = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
