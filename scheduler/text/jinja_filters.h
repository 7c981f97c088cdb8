#pragma once
// Private to the filters' two files: how a filter is found by its name.

#include <string_view>

#include "scheduler/text/jinja_builtins.h"

namespace zipage::jinja {

using FilterFn = Value (*)(Runtime*, const Value&, const Args&);

struct NamedFilter {
  std::string_view name;
  FilterFn apply;
};

// A filter that works on the elements of lists and dicts; null if the name is of none.
FilterFn FindSequenceFilter(std::string_view name);

}  // namespace zipage::jinja
