#include "scheduler/text/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_text.h"
#include "scheduler/text/utf8.h"

namespace zipage::jinja {
namespace {

constexpr int64_t kStepCost = 1;
constexpr size_t kBytesPerUnit = 16;
constexpr size_t kMaxMessageBytes = 400;
constexpr size_t kMaxReprBytes = 64 << 20;

void AppendRepr(Runtime* rt, const Value& value, std::string* out);

void AppendItems(Runtime* rt, const List& list, std::string* out) {
  if (list.kind != List::Kind::kList && list.kind != List::Kind::kTuple) {
    rt->Unsupported("printing a generator, a range or a dict view");
    return;
  }
  bool tuple = list.kind == List::Kind::kTuple;
  *out += tuple ? '(' : '[';
  for (size_t i = 0; i < list.items.size() && rt->ok(); ++i) {
    if (i > 0) *out += ", ";
    AppendRepr(rt, list.items[i], out);
  }
  if (tuple && list.items.size() == 1) *out += ",";
  *out += tuple ? ')' : ']';
}

void AppendEntries(Runtime* rt, const Dict& dict, std::string* out) {
  *out += '{';
  for (size_t i = 0; i < dict.entries.size() && rt->ok(); ++i) {
    if (i > 0) *out += ", ";
    AppendRepr(rt, dict.entries[i].first, out);
    *out += ": ";
    AppendRepr(rt, dict.entries[i].second, out);
  }
  *out += '}';
}

// Python's repr of a string: single quotes unless only those occur inside.
std::string StringRepr(Runtime* rt, const std::string& text) {
  rt->Charge(text.size());
  char quote =
      text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    Utf8Char c = DecodeUtf8(std::string_view(text).substr(i));
    char32_t p = c.code_point;
    if (p == static_cast<char32_t>(quote) || p == '\\') {
      out += {'\\', static_cast<char>(p)};
    } else if (p == '\n') {
      out += "\\n";
    } else if (p == '\r') {
      out += "\\r";
    } else if (p == '\t') {
      out += "\\t";
    } else if (!IsPrintable(p)) {
      const char* format = p < 0x100 ? "\\x%02x" : p < 0x10000 ? "\\u%04x" : "\\U%08x";
      char buffer[16];
      std::snprintf(buffer, sizeof(buffer), format, static_cast<unsigned>(p));
      out += buffer;
    } else {
      out.append(text, i, c.size);
    }
    i += c.size;
  }
  return out + quote;
}

bool ListsEqual(Runtime* rt, const List& a, const List& b) {
  if (a.kind != b.kind || a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size() && rt->ok(); ++i) {
    if (!Equals(rt, a.items[i], b.items[i])) return false;
  }
  return true;
}

bool DictsEqual(Runtime* rt, const Dict& a, const Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = Find(rt, b, key);
    if (other == nullptr || !Equals(rt, value, *other) || !rt->ok()) return false;
  }
  return true;
}

bool IsPlainList(const Value& v) {
  return v.is_list() &&
         (v.as_list().kind == List::Kind::kList || v.as_list().kind == List::Kind::kTuple);
}

}  // namespace

void Runtime::Set(absl::StatusCode code, std::string_view message) {
  if (!ok()) return;
  // One line, and not the text of a whole conversation.
  size_t size = std::min(message.size(), kMaxMessageBytes);
  while (size < message.size() && (static_cast<uint8_t>(message[size]) & 0xC0) == 0x80) --size;
  std::string line(message.substr(0, size));
  std::replace(line.begin(), line.end(), '\n', ' ');
  status_ = absl::Status(code, absl::StrFormat("chat template, line %d: %s", line_, line));
}
void Runtime::Fail(std::string_view message) { Set(absl::StatusCode::kInvalidArgument, message); }
void Runtime::Unsupported(std::string_view what) {
  Set(absl::StatusCode::kUnimplemented, absl::StrFormat("%s is not supported", what));
}
void Runtime::Exhausted(std::string_view what) { Set(absl::StatusCode::kResourceExhausted, what); }

bool Runtime::Charge(size_t bytes_or_elements) {
  budget_ -= kStepCost + static_cast<int64_t>(bytes_or_elements / kBytesPerUnit);
  if (budget_ < 0) Exhausted("the template does too much work for one conversation");
  return ok();
}

std::string Value::undefined_message() const {
  const Undefined* undefined = std::get_if<Undefined>(&data_);
  return undefined != nullptr && undefined->message ? *undefined->message : "value is undefined";
}

std::optional<int64_t> Value::index() const {
  if (is_bool()) return as_bool() ? 1 : 0;
  if (is_int()) return std::get<int64_t>(data_);
  return std::nullopt;
}

double Value::number() const { return is_float() ? as_float() : static_cast<double>(*index()); }

int Depth(const Value& value) {
  if (value.is_list()) return value.as_list().depth;
  if (value.is_dict()) return value.as_dict().depth;
  return 0;
}

namespace {

// Raises `*depth` for an element; an error if the element may not be in a container.
bool Admit(Runtime* rt, const Value& element, int* depth) {
  if (element.is_namespace() || element.is_loop() || element.is_callable()) {
    rt->Unsupported("a namespace, loop or function inside a list or dict");
    return false;
  }
  *depth = std::max(*depth, Depth(element) + 1);
  if (*depth > kMaxValueDepth) {
    rt->Exhausted("lists and dicts are nested too deeply");
    return false;
  }
  return true;
}

}  // namespace

Value MakeList(Runtime* rt, std::vector<Value> items, List::Kind kind) {
  auto list = std::make_shared<List>();
  rt->Charge(items.size() * sizeof(Value));
  for (const Value& item : items) {
    if (!Admit(rt, item, &list->depth)) return Value();
  }
  list->kind = kind;
  list->items = std::move(items);
  return Value(std::move(list));
}

Value MakeDict(Runtime* rt, const std::vector<std::pair<Value, Value>>& entries) {
  auto dict = std::make_shared<Dict>();
  for (const auto& [key, value] : entries) {
    if (!rt->Charge(2 * sizeof(Value)) || !Admit(rt, value, &dict->depth)) return Value();
    if (key.is_string()) {
      auto [it, is_new] = dict->by_name.emplace(key.as_string(), dict->entries.size());
      if (is_new) {
        dict->entries.emplace_back(key, value);
      } else {
        dict->entries[it->second].second = value;
      }
      continue;
    }
    if (!key.is_number() && !key.is_none()) {
      rt->Unsupported(absl::StrFormat("a dict key of type %s", TypeName(key)));
      return Value();
    }
    const Value* old = Find(rt, *dict, key);
    if (old != nullptr) {
      *const_cast<Value*>(old) = value;
    } else {
      dict->entries.emplace_back(key, value);
    }
  }
  return Value(std::shared_ptr<const Dict>(std::move(dict)));
}

Value MakeString(Runtime* rt, std::string text) {
  if (!rt->Charge(text.size())) return Value();
  return Value(std::move(text));
}

const Value* Find(const Dict& dict, std::string_view name) {
  auto it = dict.by_name.find(absl::string_view(name.data(), name.size()));
  return it == dict.by_name.end() ? nullptr : &dict.entries[it->second].second;
}

const Value* Find(Runtime* rt, const Dict& dict, const Value& key) {
  if (key.is_string()) return Find(dict, key.as_string());
  if (dict.by_name.size() == dict.entries.size()) return nullptr;
  for (const auto& [k, v] : dict.entries) {
    if (!rt->Charge(0)) return nullptr;
    if (!k.is_string() && Equals(rt, k, key)) return &v;
  }
  return nullptr;
}

std::string TypeName(const Value& v) {
  if (v.is_undefined()) return "undefined";
  if (v.is_none()) return "NoneType";
  if (v.is_bool()) return "bool";
  if (v.is_int()) return "int";
  if (v.is_float()) return "float";
  if (v.is_string()) return "str";
  if (v.is_dict()) return "dict";
  if (v.is_namespace()) return "Namespace";
  if (v.is_loop()) return "LoopContext";
  if (v.is_callable()) return "function";
  if (v.is_markup()) return "Markup";
  switch (v.as_list().kind) {
    case List::Kind::kList:
      return "list";
    case List::Kind::kTuple:
      return "tuple";
    case List::Kind::kView:
      return "dict view";
    case List::Kind::kGenerator:
      return "generator";
    case List::Kind::kRange:
      return "range";
  }
  return "value";
}

bool Truthy(const Value& v) {
  if (v.is_undefined() || v.is_none()) return false;
  if (v.is_bool()) return v.as_bool();
  if (v.is_int()) return *v.index() != 0;
  if (v.is_float()) return v.as_float() != 0;
  if (v.is_string()) return !v.as_string().empty();
  if (v.is_markup()) return !v.as_markup().empty();
  if (v.is_list()) return v.as_list().kind == List::Kind::kGenerator || !v.as_list().items.empty();
  if (v.is_dict()) return !v.as_dict().entries.empty();
  return true;
}

bool Equals(Runtime* rt, const Value& a, const Value& b) {
  if (!rt->Charge(a.is_string() ? a.as_string().size() : 0)) return false;
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() == b.number();
    return *a.index() == *b.index();
  }
  if (a.is_string() && b.is_string()) return a.as_string() == b.as_string();
  if (a.is_list() && b.is_list()) {
    if (a.list_ptr() == b.list_ptr()) return true;
    if (!IsPlainList(a) || !IsPlainList(b)) {
      rt->Unsupported("comparing generators, ranges or dict views");
      return false;
    }
    return ListsEqual(rt, a.as_list(), b.as_list());
  }
  if (a.is_dict() && b.is_dict()) return DictsEqual(rt, a.as_dict(), b.as_dict());
  if (a.is_namespace() || a.is_loop() || a.is_callable() || a.is_markup() || b.is_markup()) {
    rt->Unsupported(absl::StrFormat("comparing a %s", TypeName(a)));
    return false;
  }
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

bool Less(Runtime* rt, const Value& a, const Value& b) {
  if (!rt->Charge(a.is_string() ? a.as_string().size() : 0)) return false;
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() < b.number();
    return *a.index() < *b.index();
  }
  // Order of UTF-8 bytes is order of code points.
  if (a.is_string() && b.is_string()) return a.as_string() < b.as_string();
  if (IsPlainList(a) && IsPlainList(b) && a.as_list().kind == b.as_list().kind) {
    const auto& x = a.as_list().items;
    const auto& y = b.as_list().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()) && rt->ok(); ++i) {
      if (!Equals(rt, x[i], y[i])) return Less(rt, x[i], y[i]);
    }
    return x.size() < y.size();
  }
  if (a.is_undefined() || b.is_undefined()) {
    rt->Fail((a.is_undefined() ? a : b).undefined_message());
  } else {
    rt->Fail(absl::StrFormat("%s and %s have no order", TypeName(a), TypeName(b)));
  }
  return false;
}

std::string FloatRepr(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
  char buffer[64];
  auto end = std::to_chars(buffer, buffer + sizeof(buffer), d, std::chars_format::scientific).ptr;
  std::string text(buffer, end);  // [-]d[.ddd]e[+-]dd, shortest digits
  size_t e = text.find('e');
  int exponent = std::stoi(text.substr(e + 1));
  bool negative = text[0] == '-';
  std::string digits;
  for (char c : text.substr(0, e)) {
    if (c >= '0' && c <= '9') digits += c;
  }
  std::string out;
  if (exponent < -4 || exponent >= 16) {
    out = digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "");
    out += absl::StrFormat("e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
  } else if (exponent < 0) {
    out = "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else {
    size_t whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() < whole + 1) digits.append(whole + 1 - digits.size(), '0');
    out = digits.substr(0, whole) + "." + digits.substr(whole);
  }
  return (negative ? "-" : "") + out;
}

std::string Str(Runtime* rt, const Value& v) {
  if (v.is_string()) {
    rt->Charge(v.as_string().size());
    return v.as_string();
  }
  if (v.is_undefined()) return "";
  return Repr(rt, v);
}

namespace {

void AppendRepr(Runtime* rt, const Value& v, std::string* out) {
  if (!rt->Charge(0)) return;
  if (out->size() > kMaxReprBytes) rt->Exhausted("a printed list or dict is too long");
  if (v.is_undefined()) {
    *out += "Undefined";
  } else if (v.is_none()) {
    *out += "None";
  } else if (v.is_bool()) {
    *out += v.as_bool() ? "True" : "False";
  } else if (v.is_int()) {
    *out += std::to_string(*v.index());
  } else if (v.is_float()) {
    *out += FloatRepr(v.as_float());
  } else if (v.is_string()) {
    *out += StringRepr(rt, v.as_string());
  } else if (v.is_list()) {
    AppendItems(rt, v.as_list(), out);
  } else if (v.is_dict()) {
    AppendEntries(rt, v.as_dict(), out);
  } else {
    rt->Unsupported(absl::StrFormat("printing a %s", TypeName(v)));
  }
}

}  // namespace

std::string Repr(Runtime* rt, const Value& value) {
  std::string out;
  AppendRepr(rt, value, &out);
  return out;
}

std::shared_ptr<const List> Iterate(Runtime* rt, const Value& v) {
  auto result = std::make_shared<List>();
  if (v.is_list()) {
    List& list = v.as_list();
    rt->Charge(list.items.size());
    if (list.kind != List::Kind::kGenerator) return v.list_ptr();
    if (!list.consumed) result->items = list.items;
    list.consumed = true;
  } else if (v.is_dict()) {
    rt->Charge(v.as_dict().entries.size() * sizeof(Value));
    for (const auto& entry : v.as_dict().entries) result->items.push_back(entry.first);
  } else if (v.is_string()) {
    std::string_view text = v.as_string();
    while (!text.empty() && rt->Charge(sizeof(Value))) {
      size_t size = DecodeUtf8(text).size;
      result->items.emplace_back(text.substr(0, size));
      text.remove_prefix(size);
    }
  } else if (!v.is_undefined()) {
    rt->Fail(absl::StrFormat("'%s' object is not iterable", TypeName(v)));
  }
  result->depth = std::max(1, Depth(v));
  return result;
}

}  // namespace zipage::jinja
