"""A driver of CUDA that a test makes up: a library with the functions that are called, compiled by g++."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["VirtualMemory", "library"]

_SOURCE = """
static int capabilities[][2] = {%s};
extern "C" {
static int ready = 0;
int cuInit(unsigned flags) { ready = %d == 0; return %d; }
int cuDriverGetVersion(int *version) { *version = %d; return 0; }
int cuDeviceGetCount(int *count) { *count = %d; return ready ? 0 : 3; }
int cuDeviceGet(int *device, int index) { *device = index + 7; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    *value = capabilities[device - 7][attribute - 75];
    return 0;
}
static int given[2] = {-1, -1};
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { given[0] = device; given[1] = flags; return %d; }
int last_flags(void) { return given[0] * 100 + given[1]; }
}
"""

_MEMORY = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <sys/mman.h>

static std::string calls, failing;
static int fails_at = 0, error = 0, supported = 1;
static uint64_t handles = 100, granule = 1 << 21;
static int pushed = 0;

// Notes a call as "name a b error", and returns the error that it is to report.
static int note(const char *name, uint64_t a = 0, uint64_t b = 0) {
    int code = failing == name && --fails_at == 0 ? error : 0;
    char line[200];
    snprintf(line, sizeof line, "%s %llu %llu %d\n", name, (unsigned long long)a, (unsigned long long)b, code);
    calls += line;
    return code;
}

struct Location { int type, id; };
struct Properties { int type, handle_types; Location location; void *metadata; unsigned char flags[8]; };
struct Access { Location location; int flags; };

static bool sound(const Properties *p) {
    unsigned char none[8] = {};
    bool here = p->location.type == 1 && p->location.id == 7;
    return p->type == 1 && here && !p->handle_types && !p->metadata && !memcmp(p->flags, none, 8);
}

extern "C" {
void begin(const char *name, int number, int code, int has) {
    calls = "", failing = name, fails_at = number, error = code, supported = has;
}
const char *what_was_called() { return calls.c_str(); }

int cuCtxGetDevice(int *device) { *device = 7; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)0x1234567890; return 0; }
int cuCtxPushCurrent_v2(void *context) { ++pushed; return note("cuCtxPushCurrent", (uint64_t)context == 0x1234567890); }
int cuCtxPopCurrent_v2(void **context) { --pushed; return note("cuCtxPopCurrent", pushed); }
int cuCtxSynchronize() { return note("cuCtxSynchronize", pushed); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 102 && device == 7 && supported;
    return 0;
}

int cuMemGetAllocationGranularity(size_t *size, const Properties *p, int option) {
    *size = granule;
    return sound(p) && !option ? 0 : 1;
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t at, uint64_t flags) {
    if (int code = note("cuMemAddressReserve", size)) return code;
    if (size % granule || alignment || at || flags) return 1;
    // No access: what touches memory that is not mapped ends the process. Addresses are whole granules.
    char *raw = (char *)mmap(nullptr, size + granule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == (char *)MAP_FAILED) return 2;
    *address = ((uint64_t)raw + granule - 1) / granule * granule;
    munmap(raw, *address - (uint64_t)raw);
    munmap((char *)*address + size, granule - (*address - (uint64_t)raw));
    return 0;
}
int cuMemCreate(uint64_t *handle, size_t size, const Properties *p, uint64_t flags) {
    *handle = ++handles;
    if (int code = note("cuMemCreate", handles, size)) return code;
    return size % granule || !sound(p) || flags ? 1 : 0;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    if (int code = note("cuMemMap", address, size)) return code;
    return address % granule || size % granule || offset || handle != handles || flags ? 1 : 0;
}
int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    if (int code = note("cuMemSetAccess", address, size)) return code;
    if (count != 1 || access->flags != 3 || access->location.type != 1 || access->location.id != 7) return 1;
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? 2 : 0;
}
int cuMemUnmap(uint64_t address, size_t size) {
    int code = note("cuMemUnmap", address, size);
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return code;
}
int cuMemRelease(uint64_t handle) { return note("cuMemRelease", handle); }
int cuMemAddressFree(uint64_t address, size_t size) {
    int code = note("cuMemAddressFree", address, size);
    munmap((void *)address, size);
    return code;
}
}
"""


def library(
    folder: Path, gpus: Sequence[tuple[int, int]] = ((9, 0),), version: int = 13000, error: int = 0, refused: int = 0
) -> Path:
    """Return the library of a driver: the compute capabilities of its GPUs, its version, and what cuInit returns.

    `refused`: what setting flags returns; the last ones are `last_flags()`, device * 100 + flags.
    """
    pairs = ", ".join(f"{{{major}, {minor}}}" for major, minor in (*gpus, (0, 0)))
    return _compiled(folder, _SOURCE % (pairs, error, error, version, len(gpus), refused))


def _compiled(folder: Path, text: str) -> Path:
    source, made = folder / "cuda.cpp", folder / "libcuda.so.1"
    source.write_text(text)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(made)], check=True, capture_output=True)
    return made


class VirtualMemory:
    """A driver whose virtual memory is the host's, in granules of 2 MiB; arguments that the real one refuses are refused."""

    granularity = 1 << 21

    def __init__(self, folder: Path) -> None:
        self.path = _compiled(folder, _MEMORY)
        self._library = ctypes.CDLL(str(self.path))
        self._library.what_was_called.restype = ctypes.c_char_p

    def begin(self, failing: str = "", number: int = 1, error: int = 2, *, supported: bool = True) -> None:
        """Forget all calls; let call `number` of the function `failing` return `error`."""
        self._library.begin(failing.encode(), number, error, int(supported))

    def calls(self, name: str = "", *, failed: bool = True) -> list[tuple[str, int, int]]:
        """Return the calls so far, of one function or of all that do something, each with two of its arguments."""
        lines = [line.split() for line in self._library.what_was_called().decode().splitlines()]
        wanted = [each for each in lines if name in ("", each[0]) and (failed or each[3] == "0")]
        return [(called, int(a), int(b)) for called, a, b, _ in wanted]
