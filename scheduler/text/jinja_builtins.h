#pragma once
// Filters, tests, methods, functions and attribute access of the template language, with the
// meaning of Jinja 3.1 in transformers' sandbox. Errors go to the Runtime. One render, one thread.

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scheduler/text/jinja_value.h"

namespace zipage::jinja {

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// The arguments of one call matched to parameter names; an error for those that match none.
class BoundArgs {
 public:
  BoundArgs(Runtime* rt, std::string_view function, const Args& args,
            std::initializer_list<std::string_view> params);

  // Null if the caller left the parameter out.
  const Value* Get(size_t param) const { return values_[param]; }
  // The same with a value for the absent case.
  Value Or(size_t param, Value fallback) const {
    return values_[param] != nullptr ? *values_[param] : fallback;
  }
  // A string parameter; an error for other types and, without a `fallback`, if it is absent.
  std::string String(size_t param, const char* fallback = nullptr) const;
  int64_t Int(size_t param, int64_t fallback) const;

 private:
  Runtime* rt_;
  std::string function_;
  std::vector<const Value*> values_;
};

// object.name and object[key]; undefined if there is no such thing. Methods come as callables.
Value GetAttr(Runtime* rt, const Value& object, std::string_view name);
Value GetItem(Runtime* rt, const Value& object, const Value& key);

Value CallMethod(Runtime* rt, const Value& self, std::string_view name, const Args& args);
// The string half of CallMethod.
Value CallStringMethod(Runtime* rt, const std::string& self, std::string_view name,
                       const Args& args);
Value ApplyFilter(Runtime* rt, std::string_view name, const Value& input, const Args& args);
bool ApplyTest(Runtime* rt, std::string_view name, const Value& input, const Args& args);

// Functions that every template sees: namespace, dict, range, raise_exception, strftime_now.
bool IsFunction(std::string_view name);
Value CallFunction(Runtime* rt, std::string_view name, const Args& args);

// a <op> b for + - * / // % **.
Value Arithmetic(Runtime* rt, std::string_view op, const Value& a, const Value& b);
// Python's `element in container`.
bool Contains(Runtime* rt, const Value& container, const Value& element);
// object[begin:end:step]; null parts are left out.
Value Slice(Runtime* rt, const Value& object, const Value* begin, const Value* end,
            const Value* step);

// A string whose case is changed; an error where Unicode's special casing would be needed.
enum class CaseChange;
Value ChangeCaseOf(Runtime* rt, std::string_view text, CaseChange change);

}  // namespace zipage::jinja
