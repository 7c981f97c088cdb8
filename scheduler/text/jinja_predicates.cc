// Tests (`x is defined`) of jinja_builtins.h.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_parser.h"
#include "scheduler/text/jinja_text.h"

namespace zipage::jinja {
namespace {

constexpr std::string_view kTests[] = {
    "defined", "undefined", "none",    "boolean",     "true",        "false",    "integer", "float",
    "number",  "string",    "mapping", "iterable",    "sequence",    "callable", "odd",     "even",
    "in",      "sameas",    "upper",   "lower",       "divisibleby", "eq",       "equalto", "ne",
    "lt",      "lessthan",  "gt",      "greaterthan", "le",          "ge",       "==",      "!=",
    "<",       "<=",        ">",       ">="};

bool IsOneOf(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Tests of the value alone.
bool TestType(const Value& v, std::string_view name) {
  bool is_generator = v.is_list() && v.as_list().kind == List::Kind::kGenerator;
  bool is_view = v.is_list() && v.as_list().kind == List::Kind::kView;
  if (name == "defined") return !v.is_undefined();
  if (name == "undefined") return v.is_undefined();
  if (name == "none") return v.is_none();
  if (name == "boolean") return v.is_bool();
  if (name == "true") return v.is_bool() && v.as_bool();
  if (name == "false") return v.is_bool() && !v.as_bool();
  if (name == "integer") return v.is_int();
  if (name == "float") return v.is_float();
  if (name == "number") return v.is_number();
  if (name == "string") return v.is_string() || v.is_markup();
  if (name == "mapping") return v.is_dict();
  if (name == "callable") return v.is_callable() || v.is_undefined();
  bool sequence = v.is_string() || v.is_dict() || v.is_undefined() || v.is_markup() ||
                  (v.is_list() && !is_generator && !is_view);
  if (name == "sequence") return sequence;
  return sequence || v.is_list() || v.is_loop();  // iterable
}

bool TestInteger(Runtime* rt, const Value& v, std::string_view name, const Args& args) {
  if (name != "divisibleby" && !args.positional.empty()) rt->Fail("odd and even take no argument");
  BoundArgs bound(rt, name, args, {"num"});
  int64_t divisor = name == "divisibleby" ? bound.Int(0, 0) : 2;
  if (v.is_undefined()) rt->Fail(v.undefined_message());
  if (divisor == 0) rt->Fail("division by zero");
  Value remainder = rt->ok() ? Arithmetic(rt, "%", v, Value(divisor)) : Value();
  return rt->ok() && Equals(rt, remainder, Value(int64_t{name == "odd"}));
}

bool TestOrder(Runtime* rt, const Value& v, std::string_view name, const Value& other) {
  if (IsOneOf(name, {"eq", "equalto", "=="})) return Equals(rt, v, other);
  if (IsOneOf(name, {"ne", "!="})) return !Equals(rt, v, other);
  if (IsOneOf(name, {"lt", "lessthan", "<"})) return Less(rt, v, other);
  if (IsOneOf(name, {"gt", "greaterthan", ">"})) return Less(rt, other, v);
  if (IsOneOf(name, {"le", "<="})) return Less(rt, v, other) || Equals(rt, v, other);
  return Less(rt, other, v) || Equals(rt, v, other);  // ge
}

}  // namespace

bool IsKnownTest(std::string_view name) {
  return std::find(std::begin(kTests), std::end(kTests), name) != std::end(kTests);
}

bool ApplyTest(Runtime* rt, std::string_view name, const Value& input, const Args& args) {
  if (IsOneOf(name, {"odd", "even", "divisibleby"})) return TestInteger(rt, input, name, args);
  if (IsOneOf(name, {"upper", "lower"})) {
    BoundArgs bound(rt, name, args, {});
    std::optional<bool> all =
        AllOfClass(Str(rt, input), name == "upper" ? CharClass::kUpper : CharClass::kLower);
    if (!all) rt->Unsupported(absl::StrFormat("test '%s' of text beyond ASCII", name));
    return all.value_or(false);
  }
  bool takes_argument = name == "in" || name == "sameas" ||
                        IsOneOf(name, {"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<",
                                       "gt", "greaterthan", ">", "le", "<=", "ge", ">="});
  if (!takes_argument) {
    BoundArgs bound(rt, name, args, {});
    return TestType(input, name);
  }
  BoundArgs bound(rt, name, args, {"other"});
  if (bound.Get(0) == nullptr) {
    rt->Fail(absl::StrFormat("test '%s' needs an argument", name));
    return false;
  }
  const Value& other = *bound.Get(0);
  if (name == "in") return Contains(rt, other, input);
  if (name != "sameas") return TestOrder(rt, input, name, other);
  if (input.is_none() || other.is_none()) return input.is_none() && other.is_none();
  if (input.is_bool() || other.is_bool()) {
    return input.is_bool() && other.is_bool() && input.as_bool() == other.as_bool();
  }
  rt->Unsupported("'sameas' of other than none, true and false");
  return false;
}

}  // namespace zipage::jinja
