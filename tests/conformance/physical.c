/* Pages of "device memory": created, counted, given back with the handle and the last mapping. */

#define _GNU_SOURCE
#include "fake.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct properties {
    int32_t type, handle_types;
    struct location location;
    void *windows;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
};
enum { PINNED = 1, POSIX_FD = 1 };

static struct page *pages;
static uint64_t next_id = 0x101, next_offset;
static uint64_t used[MAX_DEVICES];
static int file = -1; /* where all but the shareable pages lie */

static int check_properties(const struct properties *p) {
    if (!p || p->type != PINNED || p->location.type != DEVICE) return INVALID_VALUE;
    if (p->handle_types != 0 && p->handle_types != POSIX_FD) return NOT_SUPPORTED;
    return is_device(p->location.id) ? SUCCESS : INVALID_DEVICE;
}

static int do_cuMemGetAllocationGranularity(
    size_t *granularity, const struct properties *properties, int recommended) {
    int code = check_properties(properties);
    if (code || !granularity || recommended < 0 || recommended > 1)
        return code ? code : INVALID_VALUE;
    *granularity = recommended ? settings.recommended : settings.granularity;
    return SUCCESS;
}
API(cuMemGetAllocationGranularity, DRIVER,
    (size_t *g, const struct properties *p, int recommended), (g, p, recommended))

/* Fresh memory is not zero: all bits set reads as NaN in every floating type. */
static int back(struct page *page) {
    static char ones[1 << 16];
    memset(ones, 0xff, sizeof ones);
    if (page->handle_types & POSIX_FD) {
        page->offset = 0;
        if ((page->file = memfd_create("shareable", MFD_CLOEXEC)) < 0) return UNKNOWN;
        if (ftruncate(page->file, (off_t)page->size)) return UNKNOWN;
    } else {
        if (file < 0 && (file = memfd_create("conformance", MFD_CLOEXEC)) < 0) return UNKNOWN;
        page->file = file;
        page->offset = next_offset;
        next_offset += page->size;
        if (ftruncate(file, (off_t)next_offset)) return UNKNOWN;
    }
    for (uint64_t done = 0; done < page->size; done += sizeof ones) {
        uint64_t rest = page->size - done, part = rest < sizeof ones ? rest : sizeof ones;
        if (pwrite(page->file, ones, part, (off_t)(page->offset + done)) != (ssize_t)part)
            return UNKNOWN;
    }
    return SUCCESS;
}

static int do_cuMemCreate(
    uint64_t *handle, size_t size, const struct properties *properties, uint64_t flags) {
    int code = check_properties(properties);
    note("%zu", size);
    if (code) return code;
    int device = properties->location.id;
    if (!handle || flags || !size || !is_aligned(size)) return INVALID_VALUE;
    if (size > settings.memory - used[device]) return OUT_OF_MEMORY;
    struct page *page = calloc(1, sizeof *page);
    *page = (struct page){.id = next_id, .size = size, .device = device, .is_held = 1,
                          .handle_types = properties->handle_types, .next = pages};
    if ((code = back(page))) {
        free(page);
        return code;
    }
    pages = page;
    used[device] += size;
    *handle = next_id++;
    note("%zu h=%lu types=%d", size, (unsigned long)page->id, page->handle_types);
    return SUCCESS;
}
API(cuMemCreate, CONTEXT,
    (uint64_t *handle, size_t size, const struct properties *p, uint64_t flags),
    (handle, size, p, flags))

struct page *find_page(uint64_t handle) {
    for (struct page *page = pages; page; page = page->next)
        if (page->id == handle) return page->is_held ? page : NULL;
    return NULL;
}

/* The memory returns when the handle and the last mapping are gone. */
void drop_if_unused(struct page *page) {
    if (page->is_held || page->mappings) return;
    struct page **link = &pages;
    while (*link != page) link = &(*link)->next;
    *link = page->next;
    if (!page->is_imported) used[page->device] -= page->size;
    if (page->handle_types & POSIX_FD)
        close(page->file);
    else
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)page->offset,
                  (off_t)page->size);
    free(page);
}

static int do_cuMemRelease(uint64_t handle) {
    struct page *page = find_page(handle);
    note("h=%lu", (unsigned long)handle);
    if (!page) return INVALID_VALUE;
    page->is_held = 0;
    drop_if_unused(page);
    return SUCCESS;
}
API(cuMemRelease, CONTEXT, (uint64_t handle), (handle))

static int do_cuMemExportToShareableHandle(void *out, uint64_t handle, int type, uint64_t flags) {
    struct page *page = find_page(handle);
    if (!out || !page || flags || type != POSIX_FD || !(page->handle_types & POSIX_FD))
        return INVALID_VALUE;
    *(int *)out = fcntl(page->file, F_DUPFD_CLOEXEC, 0);
    return *(int *)out < 0 ? UNKNOWN : SUCCESS;
}
API(cuMemExportToShareableHandle, CONTEXT, (void *out, uint64_t handle, int type, uint64_t flags),
    (out, handle, type, flags))

/* The memory counts where it was created; here it is a handle more. */
static int do_cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type) {
    struct stat status;
    int given = (int)(intptr_t)descriptor;
    if (!handle || type != POSIX_FD || fstat(given, &status)) return INVALID_VALUE;
    if (!status.st_size || !is_aligned((uint64_t)status.st_size)) return INVALID_VALUE;
    struct page *page = calloc(1, sizeof *page);
    *page = (struct page){.id = next_id, .size = (uint64_t)status.st_size, .handle_types = POSIX_FD,
                          .device = current_device(), .is_held = 1, .is_imported = 1,
                          .file = fcntl(given, F_DUPFD_CLOEXEC, 0), .next = pages};
    pages = page;
    *handle = next_id++;
    return SUCCESS;
}
API(cuMemImportFromShareableHandle, CONTEXT, (uint64_t *handle, void *descriptor, int type),
    (handle, descriptor, type))

static int do_cuMemGetInfo(size_t *free_bytes, size_t *total) {
    if (!free_bytes || !total) return INVALID_VALUE;
    int device = current_device();
    *free_bytes = settings.memory - used[device];
    *total = settings.memory;
    return SUCCESS;
}
API(cuMemGetInfo, CONTEXT, (size_t *free_bytes, size_t *total), (free_bytes, total))

long count_pages(const char *what) {
    long count = 0;
    if (!strcmp(what, "handles"))
        for (struct page *p = pages; p; p = p->next) count += p->is_held;
    else if (!strcmp(what, "bytes"))
        for (int i = 0; i < MAX_DEVICES; i++) count += (long)used[i];
    else
        return -1;
    return count;
}
