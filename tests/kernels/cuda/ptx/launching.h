// Kernels by name, and grids of them.
#pragma once

#include <string>

#include "machine.h"

namespace ptx {

// Makes the kernels of a PTX file known; they are parsed when they are launched. Another file's kernels of the same
// names are replaced.
void read_listing(const std::string& path);

// Runs the thread blocks of a grid one after the other. Throws what is wrong with the launch or the kernel; of one that
// is launched early, also what it does before it has waited for the kernel before it.
void launch(const std::string& name, dim3 grid, dim3 threads, size_t shared_bytes, const void* parameters,
            bool is_early);

// Begins to count what launches ask of memory, anew, or ends.
void count_accesses(bool are_counted);

// What was counted: for every kernel a line of its name and warps, and one for each of its instructions that was
// executed: its place, times, wavefronts, the least of them, sectors, bytes. Tabs lie between.
std::string counts();

// Kernels of the launches since this was asked, a line each.
std::string names_of_launches();

// Names, a line each.
std::string names_of_kernels(bool is_launched);

}  // namespace ptx
