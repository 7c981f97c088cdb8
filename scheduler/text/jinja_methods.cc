// Attributes and methods of jinja_builtins.h, and the functions every template sees.
#include <algorithm>
#include <ctime>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_text.h"

namespace zipage::jinja {
namespace {

using Names = std::initializer_list<std::string_view>;

bool IsOneOf(std::string_view name, Names names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr size_t kMaxRange = 100'000;  // Jinja's sandbox has the same
constexpr size_t kMaxTimeBytes = 256;

const Names kStringMethods = {
    "strip",      "lstrip",   "rstrip",       "split",   "rsplit",  "splitlines",  "replace",
    "startswith", "endswith", "upper",        "lower",   "title",   "join",        "capitalize",
    "find",       "rfind",    "count",        "isdigit", "isalpha", "isalnum",     "isspace",
    "isupper",    "islower",  "removeprefix", "index",   "rindex",  "removesuffix"};
// What str, list and dict have besides in Python.
const Names kOtherStringMethods = {"casefold",     "center",     "encode",    "expandtabs",
                                   "format",       "format_map", "isascii",   "isdecimal",
                                   "isidentifier", "isnumeric",  "istitle",   "isprintable",
                                   "ljust",        "maketrans",  "partition", "rjust",
                                   "rpartition",   "swapcase",   "translate", "zfill"};
const Names kListMethods = {"append", "clear", "copy",   "count",   "extend", "index",
                            "insert", "pop",   "remove", "reverse", "sort"};
const Names kDictMethods = {"get", "items", "keys", "values"};
const Names kOtherDictMethods = {"clear",   "copy",       "fromkeys", "pop",
                                 "popitem", "setdefault", "update"};

Value BindMethod(const Value& self, std::string_view name) {
  auto callable = std::make_shared<Callable>();
  callable->kind = Callable::Kind::kMethod;
  callable->name = std::string(name);
  callable->self = std::make_shared<const Value>(self);
  return Value(std::shared_ptr<const Callable>(std::move(callable)));
}

Value LoopAttr(Runtime* rt, const Value& self, std::string_view name) {
  const Loop& loop = self.as_loop();
  int64_t index0 = static_cast<int64_t>(loop.index0);
  int64_t size = static_cast<int64_t>(loop.items->items.size());
  if (name == "index0") return Value(index0);
  if (name == "index") return Value(index0 + 1);
  if (name == "revindex") return Value(size - index0);
  if (name == "revindex0") return Value(size - index0 - 1);
  if (name == "first") return Value(index0 == 0);
  if (name == "last") return Value(index0 + 1 == size);
  if (name == "length") return Value(size);
  if (name == "depth") return Value(int64_t{1});  // more in recursive loops only
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem") {
    return index0 > 0 ? loop.items->items[loop.index0 - 1]
                      : Value::MakeUndefined("there is no previous item");
  }
  if (name == "nextitem") {
    return index0 + 1 < size ? loop.items->items[loop.index0 + 1]
                             : Value::MakeUndefined("there is no next item");
  }
  if (name == "cycle") return BindMethod(self, name);
  rt->Unsupported(absl::StrFormat("loop.%s", name));
  return Value();
}

Value DictMethod(Runtime* rt, const Value& self, std::string_view name, const Args& args) {
  const Dict& dict = self.as_dict();
  if (name == "get") {
    BoundArgs bound(rt, "get", args, {"key", "default"});
    const Value* found = bound.Get(0) == nullptr ? nullptr : Find(rt, dict, *bound.Get(0));
    return found != nullptr ? *found : bound.Or(1, Value::MakeNone());
  }
  BoundArgs bound(rt, name, args, {});
  std::vector<Value> items;
  for (const auto& [key, value] : dict.entries) {
    if (!rt->ok()) break;
    if (name == "keys") items.push_back(key);
    if (name == "values") items.push_back(value);
    if (name == "items") items.push_back(MakeList(rt, {key, value}, List::Kind::kTuple));
  }
  return MakeList(rt, std::move(items), List::Kind::kView);
}

Value MakeRange(Runtime* rt, const Args& args) {
  BoundArgs bound(rt, "range", args, {"start", "stop", "step"});
  if (!rt->ok() || args.positional.empty() || !args.named.empty()) {
    rt->Fail("range takes 1 to 3 integers");
    return Value();
  }
  int64_t start = bound.Int(0, 0);
  int64_t stop = bound.Int(1, 0);
  int64_t step = bound.Int(2, 1);
  if (args.positional.size() == 1) std::swap(start, stop);
  if (step == 0) rt->Fail("range with step 0");
  std::vector<Value> items;
  for (int64_t i = start; rt->ok() && (step > 0 ? i < stop : i > stop);) {
    if (items.size() == kMaxRange) rt->Exhausted("a range is longer than 100000");
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return MakeList(rt, std::move(items), List::Kind::kRange);
}

// Entries of dict(mapping, key=value, ...).
std::vector<std::pair<Value, Value>> DictArgs(Runtime* rt, const Args& args) {
  std::vector<std::pair<Value, Value>> entries;
  if (args.positional.size() > 1) rt->Fail("dict takes one mapping");
  for (const Value& mapping : args.positional) {
    if (!mapping.is_dict()) {
      rt->Unsupported(absl::StrFormat("dict of a %s", TypeName(mapping)));
      return entries;
    }
    entries = mapping.as_dict().entries;
  }
  for (const auto& [name, value] : args.named) entries.emplace_back(Value(name), value);
  return entries;
}

Value MakeNamespace(Runtime* rt, const Args& args) {
  auto ns = std::make_shared<Namespace>();
  for (auto& [key, value] : DictArgs(rt, args)) {
    if (!key.is_string() || value.is_namespace()) {
      rt->Unsupported("a namespace in a namespace, or a name that is no string,");
      return Value();
    }
    ns->attributes.emplace_back(key.as_string(), value);
  }
  return Value(std::move(ns));
}

Value StrftimeNow(Runtime* rt, const Args& args) {
  BoundArgs bound(rt, "strftime_now", args, {"format"});
  std::string format = bound.String(0);
  if (format.size() > kMaxTimeBytes || format.find("%f") != std::string::npos) {
    rt->Unsupported("this format of strftime_now");
    return Value();
  }
  std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  char buffer[4096];
  size_t size = std::strftime(buffer, sizeof(buffer), format.c_str(), &local);
  return MakeString(rt, std::string(buffer, size));
}

}  // namespace

BoundArgs::BoundArgs(Runtime* rt, std::string_view function, const Args& args,
                     std::initializer_list<std::string_view> params)
    : rt_(rt), function_(function), values_(params.size()) {
  if (args.positional.size() > params.size()) {
    rt->Fail(absl::StrFormat("%s takes at most %d arguments", function, params.size()));
    return;
  }
  for (size_t i = 0; i < args.positional.size(); ++i) values_[i] = &args.positional[i];
  for (const auto& [name, value] : args.named) {
    auto it = std::find(params.begin(), params.end(), name);
    size_t at = static_cast<size_t>(it - params.begin());
    if (it == params.end() || values_[at] != nullptr) {
      rt->Fail(absl::StrFormat("%s: unexpected argument '%s'", function, name));
      return;
    }
    values_[at] = &value;
  }
}

std::string BoundArgs::String(size_t param, const char* fallback) const {
  const Value* value = values_[param];
  if (value != nullptr && value->is_string()) return value->as_string();
  if (value == nullptr && fallback != nullptr) return fallback;
  rt_->Fail(absl::StrFormat("%s: argument %d has to be a string", function_, param + 1));
  return "";
}

int64_t BoundArgs::Int(size_t param, int64_t fallback) const {
  const Value* value = values_[param];
  if (value == nullptr) return fallback;
  if (value->index()) return *value->index();
  rt_->Fail(absl::StrFormat("%s: argument %d has to be an integer", function_, param + 1));
  return fallback;
}

Value GetAttr(Runtime* rt, const Value& object, std::string_view name) {
  if (object.is_undefined()) {
    rt->Fail(object.undefined_message());
    return Value();
  }
  if (name.substr(0, 2) == "__") {
    rt->Unsupported(absl::StrFormat("attribute '%s'", name));
    return Value();
  }
  if (object.is_namespace()) {
    for (const auto& [key, value] : object.as_namespace().attributes) {
      if (key == name) return value;
    }
  } else if (object.is_loop()) {
    return LoopAttr(rt, object, name);
  } else if (object.is_dict()) {
    if (IsOneOf(name, kDictMethods)) return BindMethod(object, name);
    if (IsOneOf(name, kOtherDictMethods)) {
      rt->Unsupported(absl::StrFormat("attribute '%s' of a dict", name));
      return Value();
    }
    const Value* value = Find(object.as_dict(), name);
    if (value != nullptr) return *value;
  } else if (object.is_string()) {
    if (IsOneOf(name, kStringMethods)) return BindMethod(object, name);
    if (IsOneOf(name, kOtherStringMethods)) {
      rt->Unsupported(absl::StrFormat("string method '%s'", name));
    }
  } else if (object.is_list() && IsOneOf(name, kListMethods)) {
    rt->Unsupported(absl::StrFormat("list method '%s'", name));
  } else if (object.is_callable() || object.is_markup()) {
    rt->Unsupported(absl::StrFormat("attribute '%s' of a %s", name, TypeName(object)));
  }
  return Value::MakeUndefined(
      absl::StrFormat("'%s' object has no attribute '%s'", TypeName(object), name));
}

Value CallMethod(Runtime* rt, const Value& self, std::string_view name, const Args& args) {
  if (self.is_string()) return CallStringMethod(rt, self.as_string(), name, args);
  if (self.is_dict()) return DictMethod(rt, self, name, args);
  if (args.positional.empty()) {  // loop.cycle
    rt->Fail("loop.cycle needs items");
    return Value();
  }
  return args.positional[self.as_loop().index0 % args.positional.size()];
}

bool IsFunction(std::string_view name) {
  return IsOneOf(name, {"namespace", "dict", "range", "raise_exception", "strftime_now", "lipsum",
                        "cycler", "joiner"});
}

Value CallFunction(Runtime* rt, std::string_view name, const Args& args) {
  if (name == "namespace") return MakeNamespace(rt, args);
  if (name == "dict") return MakeDict(rt, DictArgs(rt, args));
  if (name == "range") return MakeRange(rt, args);
  if (name == "strftime_now") return StrftimeNow(rt, args);
  if (name == "raise_exception") {
    BoundArgs bound(rt, name, args, {"message"});
    rt->Fail(Str(rt, bound.Or(0, Value())));
    return Value();
  }
  rt->Unsupported(absl::StrFormat("function '%s'", name));
  return Value();
}

}  // namespace zipage::jinja
