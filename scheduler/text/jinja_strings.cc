// Methods of strings: CallStringMethod of jinja_builtins.h.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_text.h"

namespace zipage::jinja {
namespace {

// A parameter that may be None or absent.
std::optional<std::string> OptionalString(const BoundArgs& bound, size_t param) {
  const Value* value = bound.Get(param);
  if (value == nullptr || value->is_none()) return std::nullopt;
  return bound.String(param);
}

Value ToList(Runtime* rt, const std::vector<std::string>& parts) {
  std::vector<Value> items;
  items.reserve(parts.size());
  for (const std::string& part : parts) items.push_back(MakeString(rt, part));
  return MakeList(rt, std::move(items));
}

Value Split(Runtime* rt, const std::string& self, const Args& args, bool from_right) {
  BoundArgs bound(rt, "split", args, {"sep", "maxsplit"});
  std::optional<std::string> separator = OptionalString(bound, 0);
  int64_t max_splits = bound.Int(1, -1);
  if (separator && separator->empty()) rt->Fail("split: empty separator");
  if (!rt->ok()) return Value();
  return ToList(rt, SplitText(self, separator, max_splits, from_right));
}

// startswith and endswith: one string or a tuple of them.
Value HasAffix(Runtime* rt, const std::string& self, const Args& args, bool at_end) {
  BoundArgs bound(rt, at_end ? "endswith" : "startswith", args, {"affix"});
  auto has = [&](const std::string& affix) {
    if (affix.size() > self.size()) return false;
    return self.compare(at_end ? self.size() - affix.size() : 0, affix.size(), affix) == 0;
  };
  const Value* affix = bound.Get(0);
  if (affix != nullptr && affix->is_list() && affix->as_list().kind == List::Kind::kTuple) {
    bool any = false;
    for (const Value& item : affix->as_list().items) {
      if (!item.is_string()) {
        rt->Fail("startswith and endswith take strings");
        return Value();
      }
      any = any || has(item.as_string());
    }
    return Value(any);
  }
  return Value(has(bound.String(0)));
}

Value Find(Runtime* rt, const std::string& self, std::string_view name, const Args& args) {
  BoundArgs bound(rt, name, args, {"sub"});
  std::string sub = bound.String(0);
  bool from_right = name[0] == 'r';
  size_t at = from_right ? self.rfind(sub) : self.find(sub);
  if (at != std::string::npos) {
    return Value(static_cast<int64_t>(NumChars(std::string_view(self).substr(0, at))));
  }
  if (name == "index" || name == "rindex") rt->Fail("substring not found");
  return Value(int64_t{-1});
}

Value Count(Runtime* rt, const std::string& self, const Args& args) {
  BoundArgs bound(rt, "count", args, {"sub"});
  std::string sub = bound.String(0);
  if (sub.empty()) return Value(static_cast<int64_t>(NumChars(self)) + 1);
  int64_t count = 0;
  for (size_t at = 0; (at = self.find(sub, at)) != std::string::npos; at += sub.size()) ++count;
  return Value(count);
}

Value JoinAll(Runtime* rt, const std::string& self, const Args& args) {
  BoundArgs bound(rt, "join", args, {"iterable"});
  std::string text;
  bool first = true;
  std::shared_ptr<const List> elements = Iterate(rt, bound.Or(0, Value::MakeNone()));
  for (const Value& item : elements->items) {
    if (!item.is_string()) {
      rt->Fail(absl::StrFormat("join: expected strings, found %s", TypeName(item)));
      return Value();
    }
    if (!rt->Charge(self.size() + item.as_string().size())) return Value();
    if (!first) text += self;
    first = false;
    text += item.as_string();
  }
  return Value(std::move(text));
}

Value Replace(Runtime* rt, const std::string& self, const Args& args) {
  BoundArgs bound(rt, "replace", args, {"old", "new", "count"});
  std::string from = bound.String(0);
  std::string to = bound.String(1);
  int64_t count = bound.Int(2, -1);
  // As many places as there could be, each as long as `to`.
  size_t places = self.size() / std::max<size_t>(from.size(), 1) + 1;
  if (!rt->ok() || !rt->Charge(self.size() + (from.empty() ? places * to.size() : 0))) {
    return Value();
  }
  size_t found = 0;
  for (size_t at = 0; !from.empty() && (at = self.find(from, at)) != std::string::npos;
       at += from.size()) {
    ++found;
  }
  if (!rt->Charge(found * to.size())) return Value();
  return MakeString(rt, ReplaceText(self, from, to, count));
}

Value Affix(Runtime* rt, const std::string& self, std::string_view name, const Args& args) {
  BoundArgs bound(rt, name, args, {"affix"});
  std::string affix = bound.String(0);
  bool at_end = name == "removesuffix";
  if (!rt->ok() || affix.size() > self.size() ||
      self.compare(at_end ? self.size() - affix.size() : 0, affix.size(), affix) != 0) {
    return Value(self);
  }
  return MakeString(
      rt, at_end ? self.substr(0, self.size() - affix.size()) : self.substr(affix.size()));
}

}  // namespace

Value ChangeCaseOf(Runtime* rt, std::string_view text, CaseChange change) {
  if (!rt->Charge(text.size())) return Value();
  std::optional<std::string> changed = ChangeCase(text, change);
  if (changed) return Value(*std::move(changed));
  rt->Unsupported("changing the case of a character with special casing");
  return Value();
}

Value CallStringMethod(Runtime* rt, const std::string& self, std::string_view name,
                       const Args& args) {
  if (!rt->Charge(self.size())) return Value();
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    BoundArgs bound(rt, name, args, {"chars"});
    std::string_view stripped =
        Strip(self, OptionalString(bound, 0), name != "rstrip", name != "lstrip");
    return MakeString(rt, std::string(stripped));
  }
  if (name == "split") return Split(rt, self, args, false);
  if (name == "rsplit") return Split(rt, self, args, true);
  if (name == "startswith") return HasAffix(rt, self, args, false);
  if (name == "endswith") return HasAffix(rt, self, args, true);
  if (name == "replace") return Replace(rt, self, args);
  if (name == "join") return JoinAll(rt, self, args);
  if (name == "count") return Count(rt, self, args);
  if (name == "removeprefix" || name == "removesuffix") return Affix(rt, self, name, args);
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex") {
    return Find(rt, self, name, args);
  }
  if (name == "splitlines") {
    BoundArgs bound(rt, name, args, {"keepends"});
    return ToList(rt, SplitLines(self, Truthy(bound.Or(0, Value(false)))));
  }
  BoundArgs bound(rt, name, args, {});
  if (name == "upper") return ChangeCaseOf(rt, self, CaseChange::kUpper);
  if (name == "lower") return ChangeCaseOf(rt, self, CaseChange::kLower);
  if (name == "title") return ChangeCaseOf(rt, self, CaseChange::kTitle);
  if (name == "capitalize") return ChangeCaseOf(rt, self, CaseChange::kCapitalize);
  static constexpr std::pair<std::string_view, CharClass> kClasses[] = {
      {"isdigit", CharClass::kDigit}, {"isalpha", CharClass::kAlpha},
      {"isalnum", CharClass::kAlnum}, {"isspace", CharClass::kSpace},
      {"isupper", CharClass::kUpper}, {"islower", CharClass::kLower}};
  for (const auto& [method, char_class] : kClasses) {
    if (method != name) continue;
    std::optional<bool> all = AllOfClass(self, char_class);
    if (!all) rt->Unsupported(absl::StrFormat("'%s' of text beyond ASCII", name));
    return Value(all.value_or(false));
  }
  rt->Unsupported(absl::StrFormat("string method '%s'", name));
  return Value();
}

}  // namespace zipage::jinja
