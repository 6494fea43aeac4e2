// Numbers of 16 bits, of which a double holds every sum and product without rounding.
#pragma once

#include <cstdint>

namespace ptx {

double half_value(uint16_t bits);
// The nearest, ties to even; of what is not a number there is one only.
uint16_t nearest_half(double x);

}  // namespace ptx
