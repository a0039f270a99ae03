/* Address ranges, what is mapped in them, and who may touch it. */

#define _GNU_SOURCE
#include "fake.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct access { struct location location; int32_t flags; };
enum { READ = 1, READ_WRITE = 3 };

struct range { uint64_t start, size; struct range *next; };
struct mapping {
    uint64_t start, size;
    struct page *page;
    int access[MAX_DEVICES];
    struct mapping *next;
};

static struct range *ranges;
static struct mapping *mappings;
static uint64_t reserved;

static int do_cuMemAddressReserve(
    uint64_t *address, size_t size, size_t alignment, uint64_t hint, uint64_t flags) {
    note("%zu", size);
    if (!address || flags || !size || !is_aligned(size) || (alignment & (alignment - 1)))
        return INVALID_VALUE;
    (void)hint;
    if (size > settings.addresses - reserved) return OUT_OF_MEMORY;
    size_t unit = alignment > settings.granularity ? alignment : settings.granularity;
    char *start = mmap(NULL, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    size_t skip = (unit - (uintptr_t)start % unit) % unit;
    if (skip) munmap(start, skip);
    if (unit - skip) munmap(start + skip + size, unit - skip);
    struct range *range = malloc(sizeof *range);
    *range = (struct range){(uintptr_t)start + skip, size, ranges};
    ranges = range;
    reserved += size;
    *address = range->start;
    note("%#lx+%zu", (unsigned long)*address, size);
    return SUCCESS;
}
API(cuMemAddressReserve, CONTEXT,
    (uint64_t *address, size_t size, size_t alignment, uint64_t hint, uint64_t flags),
    (address, size, alignment, hint, flags))

static int overlaps_mapping(uint64_t start, uint64_t size) {
    for (struct mapping *m = mappings; m; m = m->next)
        if (m->start < start + size && start < m->start + m->size) return 1;
    return 0;
}

static int do_cuMemAddressFree(uint64_t address, size_t size) {
    note("%#lx+%zu", (unsigned long)address, size);
    struct range **link = &ranges;
    while (*link && (*link)->start != address) link = &(*link)->next;
    struct range *range = *link;
    if (!range || range->size != size || overlaps_mapping(address, size)) return INVALID_VALUE;
    munmap((void *)address, size);
    reserved -= size;
    *link = range->next;
    free(range);
    return SUCCESS;
}
API(cuMemAddressFree, CONTEXT, (uint64_t address, size_t size), (address, size))

static int is_reserved(uint64_t start, uint64_t size) {
    for (struct range *r = ranges; r; r = r->next)
        if (r->start <= start && start + size <= r->start + r->size) return 1;
    return 0;
}

static int do_cuMemMap(
    uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    struct page *page = find_page(handle);
    note("%#lx+%zu h=%lu", (unsigned long)address, size, (unsigned long)handle);
    if (flags || offset || !is_aligned(address) || !page || size != page->size)
        return INVALID_VALUE;
    if (!is_reserved(address, size) || overlaps_mapping(address, size)) return INVALID_VALUE;
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, page->file,
             (off_t)page->offset) == MAP_FAILED)
        return OUT_OF_MEMORY;
    struct mapping *mapping = calloc(1, sizeof *mapping);
    *mapping = (struct mapping){.start = address, .size = size, .page = page, .next = mappings};
    mappings = mapping;
    page->mappings++;
    return SUCCESS;
}
API(cuMemMap, CONTEXT,
    (uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags),
    (address, size, offset, handle, flags))

/* Whole mappings, side by side, from start to start + size? */
static int is_run(uint64_t start, uint64_t size) {
    uint64_t covered = 0;
    for (struct mapping *m = mappings; m; m = m->next) {
        if (m->start >= start + size || m->start + m->size <= start) continue;
        if (m->start < start || m->start + m->size > start + size) return 0;
        covered += m->size;
    }
    return size && covered == size;
}

/* Would a grant take something away from work that is queued? */
static int takes_from_work(const struct mapping *m, const struct access *a) {
    return (m->access[a->location.id] & ~a->flags) && is_in_use(m->start, m->size);
}

static int do_cuMemSetAccess(
    uint64_t address, size_t size, const struct access *access, size_t count) {
    note("%#lx+%zu devices=%zu flags=%d", (unsigned long)address, size, count,
         access && count ? access[0].flags : 0);
    if (!access || !count || !is_run(address, size)) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const struct access *a = &access[i];
        if (a->location.type != DEVICE) return INVALID_VALUE;
        if (a->flags != 0 && a->flags != READ && a->flags != READ_WRITE) return INVALID_VALUE;
        if (!is_device(a->location.id)) return INVALID_DEVICE;
        for (struct mapping *m = mappings; m; m = m->next)
            if (m->start >= address && m->start < address + size) {
                if (!reaches(a->location.id, m->page->device)) return INVALID_DEVICE;
                if (takes_from_work(m, a)) return ILLEGAL_ADDRESS;
            }
    }
    for (struct mapping *m = mappings; m; m = m->next) {
        if (m->start < address || m->start >= address + size) continue;
        for (size_t i = 0; i < count; i++) m->access[access[i].location.id] = access[i].flags;
        int flags = m->access[m->page->device]; /* the owner's code is what runs here */
        int rights = flags == READ_WRITE ? PROT_READ | PROT_WRITE : flags ? PROT_READ : PROT_NONE;
        mprotect((void *)m->start, m->size, rights);
    }
    return SUCCESS;
}
API(cuMemSetAccess, CONTEXT,
    (uint64_t address, size_t size, const struct access *access, size_t count),
    (address, size, access, count))

static int do_cuMemGetAccess(uint64_t *flags, const struct location *location, uint64_t address) {
    if (!flags || !location || !is_device(location->id)) return INVALID_VALUE;
    for (struct mapping *m = mappings; m; m = m->next)
        if (m->start <= address && address < m->start + m->size) {
            *flags = (uint64_t)m->access[location->id];
            return SUCCESS;
        }
    return INVALID_VALUE;
}
API(cuMemGetAccess, CONTEXT, (uint64_t *flags, const struct location *location, uint64_t address),
    (flags, location, address))

static int do_cuMemUnmap(uint64_t address, size_t size) {
    note("%#lx+%zu", (unsigned long)address, size);
    if (!is_run(address, size)) return INVALID_VALUE;
    if (is_in_use(address, size)) return ILLEGAL_ADDRESS;
    for (struct mapping **link = &mappings; *link;) {
        struct mapping *m = *link;
        if (m->start < address || m->start >= address + size) {
            link = &m->next;
            continue;
        }
        mmap((void *)m->start, m->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        m->page->mappings--;
        drop_if_unused(m->page);
        *link = m->next;
        free(m);
    }
    return SUCCESS;
}
API(cuMemUnmap, CONTEXT, (uint64_t address, size_t size), (address, size))

long count_mappings(const char *what) {
    long count = 0;
    if (!strcmp(what, "ranges"))
        for (struct range *r = ranges; r; r = r->next) count++;
    else if (!strcmp(what, "mappings"))
        for (struct mapping *m = mappings; m; m = m->next) count++;
    else
        return -1;
    return count;
}
