// What the files of the stand-in share. See README.md.
#pragma once

#include <driver_types.h>
#include <stddef.h>

// 1: device memory has data, for tests of copies; 0: it has addresses only, and reading it ends the process.
int standin_has_data(void);
// Tells of a call where that is asked for; 0, the code of success.
int standin_called(const char *name);
// Memory of the device, and what of it is allocated.
size_t standin_bytes(void);
size_t standin_used(void);
