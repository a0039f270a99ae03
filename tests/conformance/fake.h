/* A library that speaks CUDA's virtual memory calls over host memory and checks their rules.
 *
 * It shows that the calls are right - what is called, in which order, with which arguments, and
 * what happens when one of them fails. It does not show how a GPU behaves: there are no kernels,
 * no time, no caches. "Device memory" is a memfd; a mapping that was granted access is readable,
 * and writable if granted, at its address, any other address of a reservation kills the process.
 *
 * Where CUDA's documentation leaves room, the stricter reading is taken.
 */

#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999
};

enum need { NOTHING, DRIVER, CONTEXT };
enum { MAX_DEVICES = 8 };

/* Set once, from the environment, when the library is loaded. */
struct settings {
    uint64_t memory;      /* KVALLOC_FAKE_MEMORY       bytes per device, 64 MiB */
    uint64_t granularity; /* KVALLOC_FAKE_GRANULARITY  minimum granularity, 2 MiB */
    uint64_t recommended; /* KVALLOC_FAKE_RECOMMENDED  recommended one, as the minimum */
    uint64_t addresses;   /* KVALLOC_FAKE_ADDRESSES    reservable bytes, 64 TiB */
    uint64_t devices;     /* KVALLOC_FAKE_DEVICES      1 */
    uint64_t peers;       /* KVALLOC_FAKE_PEERS        1: devices reach each other */
    uint64_t managed;     /* KVALLOC_FAKE_VMM          1: virtual memory management offered */
};
extern struct settings settings;

/* One exported function: found by name, counted, failed on demand. */
struct call {
    const char *name;
    void *function;
    long count;
    struct call *next;
};

void add(struct call *call);
/* Locks, counts, fails on demand, checks what the call needs; leave() logs and unlocks. */
int enter(struct call *call, enum need need);
int leave(struct call *call, int code);
/* Arguments worth a place in the log. */
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* device.c */
int current_device(void); /* -1: no context is current in this thread */
int is_initialized(void);
int is_device(int device);
int reaches(int device, int owner);
int is_in_use(uint64_t address, uint64_t size); /* by queued work that has not completed */
void launch(uint64_t stream, uint64_t start, uint64_t size);
long count_device(const char *what);

/* physical.c */
enum { DEVICE = 1 };
struct location { int32_t type, id; };
struct page {
    uint64_t id, size, offset;
    int device, handle_types, is_held;
    int file, is_imported; /* where it lies; a shareable one has a file of its own */
    long mappings;
    struct page *next;
};
static inline int is_aligned(uint64_t value) { return value % settings.granularity == 0; }
struct page *find_page(uint64_t handle); /* NULL: unknown or released */
void drop_if_unused(struct page *page);
long count_pages(const char *what);

/* mappings.c */
long count_mappings(const char *what);

/* A call: exported under its own name, its rules in do_NAME. */
#define API(name, need, params, args)                                                     \
    int name params;                                                                      \
    static struct call name##_call = {#name, (void *)name, 0, NULL};                      \
    __attribute__((constructor)) static void name##_add(void) { add(&name##_call); }      \
    int name params {                                                                     \
        int code = enter(&name##_call, need);                                             \
        return leave(&name##_call, code ? code : do_##name args);                         \
    }
