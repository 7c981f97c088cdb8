// Filters of lists and dicts, of jinja_builtins.h.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_filters.h"
#include "scheduler/text/jinja_parser.h"
#include "scheduler/text/jinja_text.h"

namespace zipage::jinja {
namespace {

// item.a.b of an attribute path "a.b"; numbers in it are indices.
Value GetPath(Runtime* rt, const Value& item, const Value& path) {
  if (path.index()) return GetItem(rt, item, path);
  if (!path.is_string()) {
    rt->Fail("an attribute has to be a string or an integer");
    return Value();
  }
  Value result = item;
  for (const std::string& part : SplitText(path.as_string(), ".", -1, false)) {
    int64_t index = 0;
    const char* end = part.data() + part.size();
    bool is_number = std::from_chars(part.data(), end, index).ptr == end && part[0] != '-';
    result = GetItem(rt, result, is_number && !part.empty() ? Value(index) : Value(part));
    if (!rt->ok()) return Value();
  }
  return result;
}

// What sort, unique, min and max compare: the attribute, lower case unless case_sensitive.
Value SortKey(Runtime* rt, const Value& item, const Value* attribute, bool case_sensitive) {
  Value key = attribute == nullptr || attribute->is_none() ? item : GetPath(rt, item, *attribute);
  if (!case_sensitive && key.is_string()) {
    return ChangeCaseOf(rt, key.as_string(), CaseChange::kLower);
  }
  return key;
}

Value Join(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "join", args, {"d", "attribute"});
  std::string separator = Str(rt, bound.Or(0, Value("")));
  const Value* attribute = bound.Get(1);
  std::string text;
  bool first = true;
  std::shared_ptr<const List> elements = Iterate(rt, in);
  for (const Value& item : elements->items) {
    bool plain = attribute == nullptr || attribute->is_none();
    if (!rt->Charge(separator.size())) return Value();
    if (!first) text += separator;
    first = false;
    text += Str(rt, plain ? item : GetPath(rt, item, *attribute));
  }
  return MakeString(rt, std::move(text));
}

Value FirstOrLast(Runtime* rt, const Value& in, bool last) {
  if (last && in.is_list() && in.as_list().kind == List::Kind::kGenerator) {
    rt->Fail("'generator' object is not reversible");
    return Value();
  }
  std::shared_ptr<const List> list = Iterate(rt, in);
  if (list->items.empty()) return Value::MakeUndefined("the sequence is empty");
  return last ? list->items.back() : list->items.front();
}

Value First(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "first", args, {});
  return FirstOrLast(rt, in, false);
}

Value Last(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "last", args, {});
  return FirstOrLast(rt, in, true);
}

Value ListOf(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "list", args, {});
  return MakeList(rt, Iterate(rt, in)->items);
}

Value Reverse(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "reverse", args, {});
  if (in.is_list() && in.as_list().kind == List::Kind::kGenerator) {
    rt->Unsupported("reversing a generator");
    return Value();
  }
  std::vector<Value> items = Iterate(rt, in)->items;
  std::reverse(items.begin(), items.end());
  if (!in.is_string()) return MakeList(rt, std::move(items), List::Kind::kGenerator);
  std::string text;
  for (const Value& item : items) text += item.as_string();
  return MakeString(rt, std::move(text));
}

Value Items(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "items", args, {});
  std::vector<Value> items;
  if (in.is_dict()) {
    for (const auto& [key, value] : in.as_dict().entries) {
      items.push_back(MakeList(rt, {key, value}, List::Kind::kTuple));
      if (!rt->ok()) return Value();
    }
  } else if (!in.is_undefined()) {
    rt->Fail("items: not a mapping");
  }
  return MakeList(rt, std::move(items), List::Kind::kGenerator);
}

Value Map(Runtime* rt, const Value& in, const Args& args) {
  std::vector<Value> items;
  if (args.positional.empty()) {
    BoundArgs bound(rt, "map", args, {"attribute", "default"});
    if (bound.Get(0) == nullptr) rt->Fail("map needs a filter or an attribute");
    const Value* fallback = bound.Get(1);
    std::shared_ptr<const List> elements = Iterate(rt, in);
    for (const Value& item : elements->items) {
      if (!rt->ok()) return Value();
      Value value = GetPath(rt, item, *bound.Get(0));
      if (!rt->ok()) return Value();
      bool use = value.is_undefined() && fallback != nullptr && !fallback->is_none();
      items.push_back(use ? *fallback : value);
    }
    return MakeList(rt, std::move(items), List::Kind::kGenerator);
  }
  if (!args.positional[0].is_string() || !IsKnownFilter(args.positional[0].as_string())) {
    rt->Unsupported("map with this filter");
    return Value();
  }
  Args rest{{args.positional.begin() + 1, args.positional.end()}, args.named};
  std::shared_ptr<const List> elements = Iterate(rt, in);
  for (const Value& item : elements->items) {
    items.push_back(ApplyFilter(rt, args.positional[0].as_string(), item, rest));
    if (!rt->ok()) return Value();
  }
  return MakeList(rt, std::move(items), List::Kind::kGenerator);
}

// select, reject, selectattr, rejectattr.
Value SelectItems(Runtime* rt, const Value& in, const Args& args, bool by_attribute, bool keep) {
  size_t offset = by_attribute ? 1 : 0;
  if (args.positional.size() < offset) {
    rt->Fail("selectattr needs an attribute");
    return Value();
  }
  std::string test;
  Args rest;
  if (args.positional.size() > offset) {
    if (!args.positional[offset].is_string() || !IsKnownTest(args.positional[offset].as_string())) {
      rt->Unsupported("select with this test");
      return Value();
    }
    test = args.positional[offset].as_string();
    rest.positional.assign(args.positional.begin() + static_cast<long>(offset) + 1,
                           args.positional.end());
    rest.named = args.named;
  }
  std::vector<Value> items;
  if (!Truthy(in)) return MakeList(rt, {}, List::Kind::kGenerator);
  std::shared_ptr<const List> elements = Iterate(rt, in);
  for (const Value& item : elements->items) {
    Value value = by_attribute ? GetPath(rt, item, args.positional[0]) : item;
    bool holds = test.empty() ? Truthy(value) : ApplyTest(rt, test, value, rest);
    if (!rt->ok()) return Value();
    if (holds == keep) items.push_back(item);
  }
  return MakeList(rt, std::move(items), List::Kind::kGenerator);
}

Value Select(Runtime* rt, const Value& in, const Args& args) {
  return SelectItems(rt, in, args, false, true);
}
Value Reject(Runtime* rt, const Value& in, const Args& args) {
  return SelectItems(rt, in, args, false, false);
}
Value SelectAttr(Runtime* rt, const Value& in, const Args& args) {
  return SelectItems(rt, in, args, true, true);
}
Value RejectAttr(Runtime* rt, const Value& in, const Args& args) {
  return SelectItems(rt, in, args, true, false);
}

// Stable sort by key. Keys that Less does not order are an error before anything moves.
std::vector<Value> SortByKey(Runtime* rt, const std::vector<Value>& items, const Value* attribute,
                             bool case_sensitive, bool reverse) {
  std::vector<std::pair<Value, const Value*>> keyed;
  for (const Value& item : items) {
    keyed.emplace_back(SortKey(rt, item, attribute, case_sensitive), &item);
    const Value& key = keyed.back().first;
    bool same = key.is_number() == keyed[0].first.is_number() &&
                key.is_string() == keyed[0].first.is_string();
    bool sortable = (key.is_number() && !std::isnan(key.number())) || key.is_string();
    if (rt->ok() && (!same || !sortable)) rt->Unsupported("sorting other than numbers or strings");
    if (!rt->ok()) return {};
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? Less(rt, b.first, a.first) : Less(rt, a.first, b.first);
  });
  std::vector<Value> sorted;
  for (const auto& [key, item] : keyed) sorted.push_back(*item);
  return sorted;
}

Value Sort(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "sort", args, {"reverse", "case_sensitive", "attribute"});
  std::shared_ptr<const List> list = Iterate(rt, in);
  if (bound.Get(2) != nullptr && bound.Get(2)->is_string() &&
      bound.Get(2)->as_string().find(',') != std::string::npos) {
    rt->Unsupported("sorting by several attributes");
  }
  return MakeList(rt, SortByKey(rt, list->items, bound.Get(2), Truthy(bound.Or(1, Value(false))),
                                Truthy(bound.Or(0, Value(false)))));
}

Value DictSort(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "dictsort", args, {"case_sensitive", "by", "reverse"});
  std::string by = bound.String(1, "key");
  if (!in.is_dict() || (by != "key" && by != "value")) {
    rt->Fail("dictsort sorts a dict by 'key' or 'value'");
    return Value();
  }
  std::vector<Value> items;
  for (const auto& [key, value] : in.as_dict().entries) {
    items.push_back(MakeList(rt, {key, value}, List::Kind::kTuple));
  }
  Value position(int64_t{by == "value"});
  return MakeList(rt, SortByKey(rt, items, &position, Truthy(bound.Or(0, Value(false))),
                                Truthy(bound.Or(2, Value(false)))));
}

Value Unique(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "unique", args, {"case_sensitive", "attribute"});
  std::vector<Value> seen;
  std::vector<Value> items;
  std::shared_ptr<const List> elements = Iterate(rt, in);
  for (const Value& item : elements->items) {
    Value key = SortKey(rt, item, bound.Get(1), Truthy(bound.Or(0, Value(false))));
    if (key.is_list() || key.is_dict()) rt->Fail("unique: a list or dict cannot be compared");
    bool known = std::any_of(seen.begin(), seen.end(),
                             [&](const Value& other) { return Equals(rt, key, other); });
    if (!rt->ok()) return Value();
    if (known) continue;
    seen.push_back(std::move(key));
    items.push_back(item);
  }
  return MakeList(rt, std::move(items), List::Kind::kGenerator);
}

Value Extreme(Runtime* rt, const Value& in, const Args& args, bool maximum) {
  BoundArgs bound(rt, maximum ? "max" : "min", args, {"case_sensitive", "attribute"});
  std::shared_ptr<const List> list = Iterate(rt, in);
  if (list->items.empty()) return Value::MakeUndefined("the sequence is empty");
  bool case_sensitive = Truthy(bound.Or(0, Value(false)));
  const Value* best = &list->items[0];
  Value best_key = SortKey(rt, *best, bound.Get(1), case_sensitive);
  for (const Value& item : list->items) {
    Value key = SortKey(rt, item, bound.Get(1), case_sensitive);
    bool better = maximum ? Less(rt, best_key, key) : Less(rt, key, best_key);
    if (!rt->ok()) return Value();
    if (!better) continue;
    best = &item;
    best_key = std::move(key);
  }
  return *best;
}

Value Max(Runtime* rt, const Value& in, const Args& args) { return Extreme(rt, in, args, true); }
Value Min(Runtime* rt, const Value& in, const Args& args) { return Extreme(rt, in, args, false); }

Value Sum(Runtime* rt, const Value& in, const Args& args) {
  BoundArgs bound(rt, "sum", args, {"attribute", "start"});
  Value total = bound.Or(1, Value(int64_t{0}));
  const Value* attribute = bound.Get(0);
  bool plain = attribute == nullptr || attribute->is_none();
  std::shared_ptr<const List> elements = Iterate(rt, in);
  for (const Value& item : elements->items) {
    total = Arithmetic(rt, "+", total, plain ? item : GetPath(rt, item, *attribute));
    if (!rt->ok()) return Value();
  }
  return total;
}

constexpr NamedFilter kFilters[] = {
    {"dictsort", DictSort},
    {"first", First},
    {"items", Items},
    {"join", Join},
    {"last", Last},
    {"list", ListOf},
    {"map", Map},
    {"max", Max},
    {"min", Min},
    {"reject", Reject},
    {"rejectattr", RejectAttr},
    {"reverse", Reverse},
    {"select", Select},
    {"selectattr", SelectAttr},
    {"sort", Sort},
    {"sum", Sum},
    {"unique", Unique},
};

}  // namespace

FilterFn FindSequenceFilter(std::string_view name) {
  for (const NamedFilter& filter : kFilters) {
    if (filter.name == name) return filter.apply;
  }
  return nullptr;
}

}  // namespace zipage::jinja
