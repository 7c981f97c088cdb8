// Arithmetic, membership, subscripts and slices of jinja_builtins.h.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_text.h"

namespace zipage::jinja {
namespace {

constexpr size_t kMaxStringBytes = 64 << 20;
constexpr int64_t kExactDouble = int64_t{1} << 53;

Value Overflow(Runtime* rt) {
  rt->Unsupported("an integer beyond 64 bits");
  return Value();
}

Value IntPower(Runtime* rt, int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) rt->Fail("0 to a negative power");
    return Value(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  int64_t result = 1;
  for (int64_t i = 0; i < exponent && (base > 1 || base < -1); ++i) {
    if (__builtin_mul_overflow(result, base, &result)) return Overflow(rt);
  }
  if (base == 0) return Value(int64_t{exponent == 0});
  if (base == -1 && exponent % 2 != 0) return Value(int64_t{-1});
  return Value(result);
}

Value IntArithmetic(Runtime* rt, std::string_view op, int64_t a, int64_t b) {
  int64_t r = 0;
  if (op == "**") return IntPower(rt, a, b);
  if (op == "+") return __builtin_add_overflow(a, b, &r) ? Overflow(rt) : Value(r);
  if (op == "-") return __builtin_sub_overflow(a, b, &r) ? Overflow(rt) : Value(r);
  if (op == "*") return __builtin_mul_overflow(a, b, &r) ? Overflow(rt) : Value(r);
  if (b == 0) {
    rt->Fail("division by zero");
    return Value();
  }
  if (op == "/") {
    if (std::max(std::abs(a / 2), std::abs(b / 2)) >= kExactDouble / 2) return Overflow(rt);
    return Value(static_cast<double>(a) / static_cast<double>(b));
  }
  if (b == -1) {  // the one case in which the machine's division overflows
    if (op == "%") return Value(int64_t{0});
    return a == INT64_MIN ? Overflow(rt) : Value(-a);
  }
  int64_t remainder = a % b;
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  return op == "%" ? Value(remainder) : Value((a - remainder) / b);
}

Value FloatArithmetic(Runtime* rt, std::string_view op, double a, double b) {
  if (op == "+") return Value(a + b);
  if (op == "-") return Value(a - b);
  if (op == "*") return Value(a * b);
  if (op == "**") {
    if (a < 0 && b != std::floor(b)) rt->Unsupported("a complex number");
    if (a == 0 && b < 0) rt->Fail("0 to a negative power");
    return Value(std::pow(a, b));
  }
  if (b == 0) {
    rt->Fail("division by zero");
    return Value();
  }
  if (op == "/") return Value(a / b);
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == "%") return Value(remainder == 0 ? std::copysign(0.0, b) : remainder);
  return Value(std::round((a - remainder) / b));
}

Value Repeat(Runtime* rt, const Value& sequence, int64_t count) {
  size_t times = count < 0 ? 0 : static_cast<size_t>(count);
  size_t size =
      sequence.is_string() ? sequence.as_string().size() : sequence.as_list().items.size();
  if (size > 0 && times > kMaxStringBytes / size / (sequence.is_string() ? 1 : sizeof(Value))) {
    rt->Exhausted("a repeated string or list is too long");
    return Value();
  }
  if (sequence.is_string()) {
    if (!rt->Charge(size * times)) return Value();
    std::string text;
    text.reserve(size * times);
    for (size_t i = 0; i < times && size > 0; ++i) text += sequence.as_string();
    return Value(std::move(text));
  }
  std::vector<Value> items;
  if (!rt->Charge(size * times * sizeof(Value))) return Value();
  for (size_t i = 0; i < times && size > 0; ++i) {
    items.insert(items.end(), sequence.as_list().items.begin(), sequence.as_list().items.end());
  }
  return MakeList(rt, std::move(items), sequence.as_list().kind);
}

bool IsSequence(const Value& v) {
  return v.is_string() || (v.is_list() && (v.as_list().kind == List::Kind::kList ||
                                           v.as_list().kind == List::Kind::kTuple));
}

Value Join(Runtime* rt, const Value& a, const Value& b) {
  if (a.is_string()) {
    if (a.as_string().size() + b.as_string().size() > kMaxStringBytes) {
      rt->Exhausted("a string is too long");
      return Value();
    }
    return MakeString(rt, a.as_string() + b.as_string());
  }
  std::vector<Value> items = a.as_list().items;
  items.insert(items.end(), b.as_list().items.begin(), b.as_list().items.end());
  return MakeList(rt, std::move(items), a.as_list().kind);
}

}  // namespace

Value Arithmetic(Runtime* rt, std::string_view op, const Value& a, const Value& b) {
  if (a.is_undefined() || b.is_undefined()) {
    rt->Fail((a.is_undefined() ? a : b).undefined_message());
    return Value();
  }
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return FloatArithmetic(rt, op, a.number(), b.number());
    return IntArithmetic(rt, op, *a.index(), *b.index());
  }
  if (op == "+" && IsSequence(a) && IsSequence(b) && TypeName(a) == TypeName(b)) {
    return Join(rt, a, b);
  }
  if (op == "*" && IsSequence(a) && b.index()) return Repeat(rt, a, *b.index());
  if (op == "*" && IsSequence(b) && a.index()) return Repeat(rt, b, *a.index());
  if (op == "%" && a.is_string()) {
    rt->Unsupported("formatting a string with %");
  } else if (a.is_markup() || b.is_markup()) {
    rt->Unsupported("computing with the result of 'safe'");
  } else {
    rt->Fail(absl::StrFormat("'%s' does not work on %s and %s", op, TypeName(a), TypeName(b)));
  }
  return Value();
}

bool Contains(Runtime* rt, const Value& container, const Value& element) {
  if (container.is_string()) {
    if (!element.is_string()) {
      rt->Fail(
          absl::StrFormat("'in' looks for a string in a string, not for a %s", TypeName(element)));
      return false;
    }
    rt->Charge(container.as_string().size());
    return container.as_string().find(element.as_string()) != std::string::npos;
  }
  if (container.is_dict()) {
    if (element.is_list() || element.is_dict()) rt->Fail("a list or dict cannot be a key");
    return rt->ok() && Find(rt, container.as_dict(), element) != nullptr;
  }
  std::shared_ptr<const List> elements = Iterate(rt, container);
  for (const Value& item : elements->items) {
    if (Equals(rt, item, element)) return true;
    if (!rt->ok()) return false;
  }
  return false;
}

Value GetItem(Runtime* rt, const Value& object, const Value& key) {
  if (object.is_undefined()) {
    rt->Fail(object.undefined_message());
    return Value();
  }
  if (object.is_dict()) {
    const Value* value = Find(rt, object.as_dict(), key);
    if (value != nullptr) return *value;
  }
  bool indexable =
      object.is_string() || (object.is_list() && object.as_list().kind != List::Kind::kView &&
                             object.as_list().kind != List::Kind::kGenerator);
  if (key.index() && indexable) {
    int64_t size = object.is_string() ? static_cast<int64_t>(NumChars(object.as_string()))
                                      : static_cast<int64_t>(object.as_list().items.size());
    int64_t i = *key.index();
    if (i < 0) i += size;
    if (i >= 0 && i < size) {
      size_t at = static_cast<size_t>(i);
      if (object.is_list()) return object.as_list().items[at];
      rt->Charge(object.as_string().size());
      return MakeString(rt, std::string(CharRange(object.as_string(), at, at + 1)));
    }
  }
  // Jinja falls back to the attribute of that name.
  if (key.is_string() && !object.is_namespace()) return GetAttr(rt, object, key.as_string());
  return Value::MakeUndefined(
      absl::StrFormat("'%s' object has no element %s", TypeName(object), Repr(rt, key)));
}

Value Slice(Runtime* rt, const Value& object, const Value* begin, const Value* end,
            const Value* step) {
  if (object.is_undefined()) {
    rt->Fail(object.undefined_message());
    return Value();
  }
  if (!IsSequence(object)) {
    rt->Fail(absl::StrFormat("'%s' object cannot be sliced", TypeName(object)));
    return Value();
  }
  for (const Value* part : {begin, end, step}) {
    if (part != nullptr && !part->is_none() && !part->index()) {
      rt->Fail("a slice needs integers");
      return Value();
    }
  }
  auto is_given = [](const Value* part) { return part != nullptr && !part->is_none(); };
  int64_t stride = is_given(step) ? *step->index() : 1;
  if (stride == 0) {
    rt->Fail("a slice with step 0");
    return Value();
  }
  int64_t size = object.is_string() ? static_cast<int64_t>(NumChars(object.as_string()))
                                    : static_cast<int64_t>(object.as_list().items.size());
  int64_t low = stride > 0 ? 0 : -1;
  int64_t high = stride > 0 ? size : size - 1;
  auto bound = [&](const Value* part, int64_t fallback) {
    if (!is_given(part)) return fallback;
    int64_t i = *part->index();
    return std::clamp(i < 0 ? i + size : i, low, high);
  };
  int64_t from = bound(begin, stride > 0 ? low : high);
  int64_t to = bound(end, stride > 0 ? high : low);
  rt->Charge(object.is_string() ? object.as_string().size() : 0);
  if (object.is_string() && stride == 1) {
    return MakeString(rt, std::string(CharRange(object.as_string(), static_cast<size_t>(from),
                                                static_cast<size_t>(std::max(from, to)))));
  }
  std::shared_ptr<const List> all = Iterate(rt, object);
  std::vector<Value> items;
  // A step beyond the size takes one element; clamped, it cannot overflow.
  stride = std::clamp(stride, -size - 1, size + 1);
  for (int64_t i = from; rt->ok() && (stride > 0 ? i < to : i > to); i += stride) {
    items.push_back(all->items[static_cast<size_t>(i)]);
  }
  if (!object.is_string()) return MakeList(rt, std::move(items), object.as_list().kind);
  std::string text;
  for (const Value& item : items) text += item.as_string();
  return MakeString(rt, std::move(text));
}

}  // namespace zipage::jinja
