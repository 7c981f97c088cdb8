#pragma once
// The values that a chat template computes with, with Python's meaning: str(), repr(), truth,
// equality, order. Values are immutable and cheap to copy, but for namespaces. One render, one
// thread.
//
// Invariants that keep hostile templates harmless: a container is at most kMaxValueDepth deep and
// holds no namespace, loop or callable (so no value contains itself); whatever walks a value pays
// for every element from the render's budget.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace zipage::jinja {

inline constexpr int kMaxValueDepth = 100;

// The first error of a render, and what it may still spend. After an error everything returns
// quickly with meaningless values; the render's caller looks at status().
class Runtime {
 public:
  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

  // Line of the template that is being executed; it goes into error messages.
  void set_line(int line) { line_ = line; }
  int line() const { return line_; }

  void Fail(std::string_view message);      // InvalidArgument: the template or its input is wrong
  void Unsupported(std::string_view what);  // Unimplemented: Jinja could, this cannot
  void Exhausted(std::string_view what);    // ResourceExhausted
  // Takes `bytes_or_elements` and a constant from the budget; false, and an error, if it is spent.
  bool Charge(size_t bytes_or_elements);

 private:
  void Set(absl::StatusCode code, std::string_view message);

  absl::Status status_;
  int line_ = 0;
  int64_t budget_ = 20'000'000;
};

class Value;
struct Macro;

struct List {
  // What Python has in the place of a list; they print, index and compare differently.
  enum class Kind { kList, kTuple, kView, kGenerator, kRange };
  Kind kind = Kind::kList;
  std::vector<Value> items;
  int depth = 1;
  bool consumed = false;  // a generator gives its items once
};

struct Dict {
  std::vector<std::pair<Value, Value>> entries;      // in insertion order
  absl::flat_hash_map<std::string, size_t> by_name;  // entries with string keys
  int depth = 1;
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;
};

struct Loop {
  std::shared_ptr<const List> items;
  size_t index0 = 0;
};

// A function of the template language, a method bound to its value, or a macro.
struct Callable {
  enum class Kind { kFunction, kMethod, kMacro };
  Kind kind;
  std::string name;
  std::shared_ptr<const Value> self;  // of a method
  const Macro* macro = nullptr;       // of a macro; the template outlives the render
};

struct Undefined {
  std::shared_ptr<const std::string> message;  // what an error about it says
};
struct None {};
struct Markup {  // result of the filter `safe`: may be printed, nothing else
  std::shared_ptr<const std::string> text;
};

class Value {
 public:
  using String = std::shared_ptr<const std::string>;

  Value() : data_(Undefined{}) {}
  explicit Value(bool b) : data_(b) {}
  explicit Value(int64_t i) : data_(i) {}
  explicit Value(double d) : data_(d) {}
  explicit Value(std::string s) : data_(std::make_shared<const std::string>(std::move(s))) {}
  explicit Value(std::string_view s) : Value(std::string(s)) {}
  explicit Value(const char* s) : Value(std::string(s)) {}
  explicit Value(std::shared_ptr<List> list) : data_(std::move(list)) {}
  explicit Value(std::shared_ptr<const Dict> dict) : data_(std::move(dict)) {}
  explicit Value(std::shared_ptr<Namespace> ns) : data_(std::move(ns)) {}
  explicit Value(std::shared_ptr<Loop> loop) : data_(std::move(loop)) {}
  explicit Value(std::shared_ptr<const Callable> callable) : data_(std::move(callable)) {}
  explicit Value(Markup markup) : data_(std::move(markup)) {}
  static Value MakeNone() {
    Value v;
    v.data_ = None{};
    return v;
  }
  static Value MakeUndefined(std::string message) {
    Value v;
    v.data_ = Undefined{std::make_shared<const std::string>(std::move(message))};
    return v;
  }

  bool is_undefined() const { return Is<Undefined>(); }
  bool is_none() const { return Is<None>(); }
  bool is_bool() const { return Is<bool>(); }
  bool is_int() const { return Is<int64_t>(); }
  bool is_float() const { return Is<double>(); }
  bool is_string() const { return Is<String>(); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_list() const { return Is<std::shared_ptr<List>>(); }
  bool is_dict() const { return Is<std::shared_ptr<const Dict>>(); }
  bool is_namespace() const { return Is<std::shared_ptr<Namespace>>(); }
  bool is_loop() const { return Is<std::shared_ptr<Loop>>(); }
  bool is_callable() const { return Is<std::shared_ptr<const Callable>>(); }
  bool is_markup() const { return Is<Markup>(); }

  // REQUIRES: of that type.
  bool as_bool() const { return std::get<bool>(data_); }
  double as_float() const { return std::get<double>(data_); }
  const std::string& as_string() const { return *std::get<String>(data_); }
  List& as_list() const { return *std::get<std::shared_ptr<List>>(data_); }
  const std::shared_ptr<List>& list_ptr() const { return std::get<std::shared_ptr<List>>(data_); }
  const Dict& as_dict() const { return *std::get<std::shared_ptr<const Dict>>(data_); }
  Namespace& as_namespace() const { return *std::get<std::shared_ptr<Namespace>>(data_); }
  const Loop& as_loop() const { return *std::get<std::shared_ptr<Loop>>(data_); }
  const Callable& as_callable() const { return *std::get<std::shared_ptr<const Callable>>(data_); }
  const std::string& as_markup() const { return *std::get<Markup>(data_).text; }
  std::string undefined_message() const;

  // The integer that a bool or an int is in Python; nothing for other types.
  std::optional<int64_t> index() const;
  // The number that a bool, an int or a float is. REQUIRES: is_number().
  double number() const;

 private:
  template <typename T>
  bool Is() const {
    return std::holds_alternative<T>(data_);
  }
  std::variant<Undefined, None, bool, int64_t, double, String, std::shared_ptr<List>,
               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>, std::shared_ptr<Loop>,
               std::shared_ptr<const Callable>, Markup>
      data_;
};

// Containers of checked contents; an error, and an undefined value, if they break an invariant.
Value MakeList(Runtime* rt, std::vector<Value> items, List::Kind kind = List::Kind::kList);
Value MakeDict(Runtime* rt, const std::vector<std::pair<Value, Value>>& entries);
Value MakeString(Runtime* rt, std::string text);  // pays for it

// Depth of a value; 0 for those that are no container.
int Depth(const Value& value);

// Entry of a dict; null if there is none.
const Value* Find(Runtime* rt, const Dict& dict, const Value& key);
const Value* Find(const Dict& dict, std::string_view name);

// Python's name of the type, for messages.
std::string TypeName(const Value& value);

bool Truthy(const Value& value);
bool Equals(Runtime* rt, const Value& a, const Value& b);
// a < b; an error if Python does not order them.
bool Less(Runtime* rt, const Value& a, const Value& b);

// str() and repr(); an error for values whose text is not reproduced (generators, functions, ...).
std::string Str(Runtime* rt, const Value& value);
std::string Repr(Runtime* rt, const Value& value);
std::string FloatRepr(double d);

// What iter() goes through: elements, keys, characters. An error for what is not iterable.
std::shared_ptr<const List> Iterate(Runtime* rt, const Value& value);

// A JSON value as Python's json module reads it.
Value FromJson(Runtime* rt, const nlohmann::ordered_json& json, int depth = 0);

struct JsonStyle {
  bool ensure_ascii = false;
  std::optional<std::string> indent;  // of one level
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
// json.dumps.
std::string ToJson(Runtime* rt, const Value& value, const JsonStyle& style);

}  // namespace zipage::jinja
