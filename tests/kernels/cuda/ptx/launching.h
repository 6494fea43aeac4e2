// Kernels by name, and grids of them.
#pragma once

#include <string>

#include "machine.h"

namespace ptx {

// Makes the kernels of a PTX file known; they are parsed when they are launched. Another file's kernels of the same
// names are replaced.
void read_listing(const std::string& path);

// Runs the thread blocks of a grid one after the other. Throws what is wrong with the launch or the kernel.
void launch(const std::string& name, dim3 grid, dim3 threads, size_t shared_bytes, const void* parameters);

// Names, a line each.
std::string names_of_kernels(bool is_launched);

}  // namespace ptx
