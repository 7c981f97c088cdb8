// Filters of single values, of jinja_builtins.h.
#include "scheduler/text/jinja_filters.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_parser.h"
#include "scheduler/text/jinja_text.h"

namespace zipage::jinja {
namespace {

Value Length(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "length", args, {});
  if (in.is_undefined()) return Value(int64_t{0});
  if (in.is_string()) return Value(static_cast<int64_t>(NumChars(in.as_string())));
  if (in.is_dict()) return Value(static_cast<int64_t>(in.as_dict().entries.size()));
  if (in.is_list() && in.as_list().kind != List::Kind::kGenerator) {
    return Value(static_cast<int64_t>(in.as_list().items.size()));
  }
  rt->Fail(absl::StrFormat("object of type '%s' has no length", TypeName(in)));
  return Value();
}

Value Default(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "default", args, {"default_value", "boolean"});
  bool replace = in.is_undefined() || (Truthy(bound.Or(1, Value(false))) && !Truthy(in));
  return replace ? bound.Or(0, Value("")) : in;
}

Value ToJsonFilter(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "tojson", args, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = Truthy(bound.Or(0, Value(false)));
  style.sort_keys = Truthy(bound.Or(3, Value(false)));
  const Value* indent = bound.Get(1);
  if (indent != nullptr && !indent->is_none()) {
    style.item_separator = ",";
    if (indent->is_string()) {
      style.indent = indent->as_string();
    } else {
      style.indent =
          std::string(static_cast<size_t>(std::clamp<int64_t>(bound.Int(1, 0), 0, 64)), ' ');
    }
  }
  const Value* separators = bound.Get(2);
  if (separators != nullptr && !separators->is_none()) {
    std::shared_ptr<const List> pair = Iterate(rt, *separators);
    if (pair->items.size() != 2 || !pair->items[0].is_string() || !pair->items[1].is_string()) {
      rt->Fail("tojson: separators are a pair of strings");
      return Value();
    }
    style.item_separator = pair->items[0].as_string();
    style.key_separator = pair->items[1].as_string();
  }
  return MakeString(rt, ToJson(rt, in, style));
}

Value Abs(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "abs", args, {});
  if (in.is_float()) return Value(std::fabs(in.as_float()));
  if (in.index() && *in.index() >= 0) return Value(*in.index());
  return Arithmetic(rt, "-", Value(int64_t{0}), in);
}

// The number a text is for Python's float(): white space around it goes, underscores do not.
std::optional<double> ParseFloat(std::string_view text) {
  text = Strip(text, std::nullopt, true, true);
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  double value = 0;
  auto [ptr, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

Value Float(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "float", args, {"default"});
  if (in.is_undefined()) rt->Fail(in.undefined_message());
  if (in.is_number()) return Value(in.number());
  std::optional<double> value;
  if (in.is_string()) value = ParseFloat(in.as_string());
  return value ? Value(*value) : bound.Or(0, Value(0.0));
}

Value Int(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "int", args, {"default", "base"});
  if (in.is_undefined()) rt->Fail(in.undefined_message());
  if (bound.Int(1, 10) != 10) rt->Unsupported("int with another base than 10");
  if (in.index()) return Value(*in.index());
  std::optional<double> number;
  if (in.is_float()) number = in.as_float();
  if (in.is_string()) {
    std::string_view text = Strip(in.as_string(), std::nullopt, true, true);
    if (!text.empty() && text[0] == '+') text.remove_prefix(1);
    int64_t value = 0;
    auto [ptr, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (!text.empty() && error == std::errc() && ptr == text.data() + text.size()) {
      return Value(value);
    }
    number = ParseFloat(in.as_string());
  }
  if (!number || !std::isfinite(*number)) return bound.Or(0, Value(int64_t{0}));
  if (std::fabs(*number) >= 9e18) rt->Unsupported("an integer beyond 64 bits");
  return rt->ok() ? Value(static_cast<int64_t>(*number)) : Value();
}

Value String(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "string", args, {});
  return in.is_string() ? in : MakeString(rt, Str(rt, in));
}

Value Safe(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "safe", args, {});
  if (in.is_markup()) return in;
  return Value(Markup{std::make_shared<const std::string>(Str(rt, in))});
}

Value Trim(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "trim", args, {"chars"});
  std::optional<std::string> chars;
  if (bound.Get(0) != nullptr && !bound.Get(0)->is_none()) chars = bound.String(0);
  std::string text = Str(rt, in);
  return MakeString(rt, std::string(Strip(text, chars, true, true)));
}

Value Upper(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "upper", args, {});
  return ChangeCaseOf(rt, Str(rt, in), CaseChange::kUpper);
}
Value Lower(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "lower", args, {});
  return ChangeCaseOf(rt, Str(rt, in), CaseChange::kLower);
}
Value Capitalize(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "capitalize", args, {});
  return ChangeCaseOf(rt, Str(rt, in), CaseChange::kCapitalize);
}

// Not str.title: words begin after white space, hyphens and opening brackets only.
Value Title(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "title", args, {});
  std::string text = Str(rt, in);
  std::string out;
  size_t start = 0;
  auto flush = [&](size_t end) {
    Value word = ChangeCaseOf(rt, std::string_view(text).substr(start, end - start),
                              CaseChange::kCapitalize);
    if (word.is_string()) out += word.as_string();
  };
  for (size_t i = 0; i < text.size() && rt->ok(); ++i) {
    if (static_cast<uint8_t>(text[i]) >= 0x80) {
      rt->Unsupported("'title' of text beyond ASCII");
    } else if (IsPythonSpace(static_cast<char32_t>(text[i])) ||
               std::string_view("-({[<").find(text[i]) != std::string_view::npos) {
      flush(i);
      out += text[i];
      start = i + 1;
    }
  }
  flush(text.size());
  return MakeString(rt, std::move(out));
}

Value Replace(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "replace", args, {"old", "new", "count"});
  if (bound.Get(0) == nullptr || bound.Get(1) == nullptr) {
    rt->Fail("replace needs old and new");
    return Value();
  }
  Args strings;
  strings.positional = {Value(Str(rt, *bound.Get(0))), Value(Str(rt, *bound.Get(1)))};
  if (bound.Get(2) != nullptr && !bound.Get(2)->is_none()) {
    strings.positional.push_back(*bound.Get(2));
  }
  return CallStringMethod(rt, Str(rt, in), "replace", strings);
}

Value Indent(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "indent", args, {"width", "first", "blank"});
  if (!in.is_string()) {
    rt->Fail(absl::StrFormat("indent works on strings, not on %s", TypeName(in)));
    return Value();
  }
  const Value* width = bound.Get(0);
  std::string indent =
      width != nullptr && width->is_string()
          ? width->as_string()
          : std::string(static_cast<size_t>(std::clamp<int64_t>(bound.Int(0, 4), 0, 1000)), ' ');
  bool blank = Truthy(bound.Or(2, Value(false)));
  std::string text = Truthy(bound.Or(1, Value(false))) ? indent : "";
  std::vector<std::string> lines = SplitLines(in.as_string() + "\n", false);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (!rt->Charge(indent.size() + lines[i].size())) return Value();
    if (i > 0) text += "\n";
    if (i > 0 && (blank || !lines[i].empty())) text += indent;
    text += lines[i];
  }
  return MakeString(rt, std::move(text));
}

constexpr NamedFilter kFilters[] = {
    {"abs", Abs},         {"capitalize", Capitalize}, {"count", Length},        {"d", Default},
    {"default", Default}, {"float", Float},           {"indent", Indent},       {"int", Int},
    {"length", Length},   {"lower", Lower},           {"replace", Replace},     {"safe", Safe},
    {"string", String},   {"title", Title},           {"tojson", ToJsonFilter}, {"trim", Trim},
    {"upper", Upper},
};

}  // namespace

// The filter of a name; null if there is none.
static FilterFn FindFilter(std::string_view name) {
  for (const NamedFilter& filter : kFilters) {
    if (filter.name == name) return filter.apply;
  }
  return FindSequenceFilter(name);
}

bool IsKnownFilter(std::string_view name) { return FindFilter(name) != nullptr; }

Value ApplyFilter(Runtime* rt, std::string_view name, const Value& input, const Args& args) {
  if (input.is_markup() && name != "safe") {
    rt->Unsupported("a filter on the result of 'safe'");
    return Value();
  }
  FilterFn filter = FindFilter(name);
  if (filter != nullptr) return rt->ok() ? filter(rt, input, args) : Value();
  rt->Unsupported(absl::StrFormat("filter '%s'", name));
  return Value();
}

}  // namespace zipage::jinja
