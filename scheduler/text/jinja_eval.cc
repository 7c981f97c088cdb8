// Expressions of the template interpreter.
#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_interpreter.h"
#include "scheduler/text/jinja_scope.h"

namespace zipage::jinja {
namespace {

// Expressions and macro calls inside each other; each takes a few hundred bytes of stack.
constexpr int kMaxEvalDepth = 500;

}  // namespace

Value Interpreter::Eval(const Expr& expr) {
  rt_->set_line(expr.line);
  if (!rt_->Charge(0)) return Value();
  if (depth_ >= kMaxEvalDepth) {
    rt_->Exhausted("expressions or macros are nested too deeply");
    return Value();
  }
  ++depth_;
  Value value = EvalKind(expr);
  --depth_;
  return rt_->ok() ? value : Value();
}

Value Interpreter::EvalKind(const Expr& expr) {
  switch (expr.kind) {
    case Expr::Kind::kConst:
      return expr.value;
    case Expr::Kind::kName:
      return EvalName(expr);
    case Expr::Kind::kNsRef:
      return Value();  // a target only
    case Expr::Kind::kList:
    case Expr::Kind::kTuple:
    case Expr::Kind::kDict:
      return EvalContainer(expr);
    case Expr::Kind::kAttr: {
      Value object = Eval(*expr.args[0]);
      if (object.is_namespace() && in_loop_filter_) {
        rt_->Unsupported("reading a namespace in the 'if' of a loop");
      }
      return rt_->ok() ? GetAttr(rt_, object, expr.name) : Value();
    }
    case Expr::Kind::kItem: {
      Value object = Eval(*expr.args[0]);
      Value key = Eval(*expr.args[1]);
      return rt_->ok() ? GetItem(rt_, object, key) : Value();
    }
    case Expr::Kind::kSlice:
      return EvalSlice(expr);
    case Expr::Kind::kCall:
      return Call(expr);
    case Expr::Kind::kFilter:
      return EvalFilters(expr, nullptr);
    case Expr::Kind::kTest: {
      Value input = Eval(*expr.args[0]);
      Args args = EvalArgs(expr);
      return Value(rt_->ok() && ApplyTest(rt_, expr.name, input, args));
    }
    case Expr::Kind::kNot:
    case Expr::Kind::kNegate:
    case Expr::Kind::kPlus:
      return EvalUnary(expr);
    case Expr::Kind::kAnd:
    case Expr::Kind::kOr: {
      Value left = Eval(*expr.args[0]);
      bool decided = Truthy(left) == (expr.kind == Expr::Kind::kOr);
      return decided || !rt_->ok() ? left : Eval(*expr.args[1]);
    }
    case Expr::Kind::kBinary: {
      Value left = Eval(*expr.args[0]);
      Value right = Eval(*expr.args[1]);
      return rt_->ok() ? Arithmetic(rt_, expr.name, left, right) : Value();
    }
    case Expr::Kind::kConcat:
      return EvalConcat(expr);
    case Expr::Kind::kCompare:
      return EvalCompare(expr);
    case Expr::Kind::kCond: {
      bool holds = Truthy(Eval(*expr.args[0]));
      if (!rt_->ok()) return Value();
      if (holds) return Eval(*expr.args[1]);
      if (expr.args[2] != nullptr) return Eval(*expr.args[2]);
      return Value::MakeUndefined("an inline 'if' without 'else' was false");
    }
  }
  return Value();
}

Value Interpreter::EvalName(const Expr& expr) {
  const Value* value = scope_->Find(expr.name);
  if (value != nullptr) return *value;
  if (!IsFunction(expr.name)) {
    return Value::MakeUndefined(absl::StrFormat("'%s' is undefined", expr.name));
  }
  auto callable = std::make_shared<Callable>();
  callable->kind = Callable::Kind::kFunction;
  callable->name = expr.name;
  return Value(std::shared_ptr<const Callable>(std::move(callable)));
}

Value Interpreter::EvalContainer(const Expr& expr) {
  std::vector<Value> values;
  values.reserve(expr.args.size());
  for (const ExprPtr& arg : expr.args) {
    values.push_back(Eval(*arg));
    if (!rt_->ok()) return Value();
  }
  if (expr.kind != Expr::Kind::kDict) {
    return MakeList(rt_, std::move(values),
                    expr.kind == Expr::Kind::kTuple ? List::Kind::kTuple : List::Kind::kList);
  }
  std::vector<std::pair<Value, Value>> entries;
  for (size_t i = 0; i + 1 < values.size(); i += 2) entries.emplace_back(values[i], values[i + 1]);
  return MakeDict(rt_, entries);
}

Value Interpreter::EvalSlice(const Expr& expr) {
  Value object = Eval(*expr.args[0]);
  Value parts[3];
  const Value* given[3] = {nullptr, nullptr, nullptr};
  for (size_t i = 0; i < 3; ++i) {
    if (expr.args[i + 1] == nullptr) continue;
    parts[i] = Eval(*expr.args[i + 1]);
    given[i] = &parts[i];
  }
  return rt_->ok() ? Slice(rt_, object, given[0], given[1], given[2]) : Value();
}

// a < b < c is a < b and b < c, each evaluated once.
Value Interpreter::EvalCompare(const Expr& expr) {
  Value left = Eval(*expr.args[0]);
  for (size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = Eval(*expr.args[i + 1]);
    if (!rt_->ok()) return Value();
    const std::string& op = expr.ops[i];
    bool holds = false;
    if (op == "in" || op == "not in") {
      holds = Contains(rt_, right, left) == (op == "in");
    } else {
      holds = ApplyTest(rt_, op, left, Args{{right}, {}});
    }
    if (!rt_->ok()) return Value();
    if (!holds) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::EvalConcat(const Expr& expr) {
  std::string text;
  for (const ExprPtr& arg : expr.args) {
    Value part = Eval(*arg);
    if (!rt_->ok()) return Value();
    text += Str(rt_, part);
    if (text.size() > kMaxOutputBytes) rt_->Exhausted("a string is too long");
  }
  return MakeString(rt_, std::move(text));
}

Value Interpreter::EvalUnary(const Expr& expr) {
  Value value = Eval(*expr.args[0]);
  if (!rt_->ok()) return Value();
  if (expr.kind == Expr::Kind::kNot) return Value(!Truthy(value));
  if (value.is_float()) {
    return expr.kind == Expr::Kind::kNegate ? Value(-value.as_float()) : value;
  }
  return Arithmetic(rt_, expr.kind == Expr::Kind::kNegate ? "-" : "+", Value(int64_t{0}), value);
}

// A chain of filters; `block` is the input of the first one in a filter block.
Value Interpreter::EvalFilters(const Expr& expr, const Value* block) {
  Value input;
  if (expr.args[0] == nullptr) {
    input = *block;
  } else if (expr.args[0]->kind == Expr::Kind::kFilter) {
    input = EvalFilters(*expr.args[0], block);
  } else {
    input = Eval(*expr.args[0]);
  }
  Args args = EvalArgs(expr);
  rt_->set_line(expr.line);
  return rt_->ok() ? ApplyFilter(rt_, expr.name, input, args) : Value();
}

Args Interpreter::EvalArgs(const Expr& expr) {
  Args args;
  for (size_t i = 1; i < expr.args.size(); ++i) args.positional.push_back(Eval(*expr.args[i]));
  for (const auto& [name, value] : expr.kwargs) args.named.emplace_back(name, Eval(*value));
  return args;
}

Value Interpreter::Call(const Expr& expr) {
  Value callee = Eval(*expr.args[0]);
  Args args = EvalArgs(expr);
  rt_->set_line(expr.line);
  if (!rt_->ok()) return Value();
  if (callee.is_undefined()) {
    rt_->Fail(callee.undefined_message());
    return Value();
  }
  if (!callee.is_callable()) {
    rt_->Fail(absl::StrFormat("'%s' object is not callable", TypeName(callee)));
    return Value();
  }
  const Callable& callable = callee.as_callable();
  switch (callable.kind) {
    case Callable::Kind::kFunction:
      return CallFunction(rt_, callable.name, args);
    case Callable::Kind::kMethod:
      return CallMethod(rt_, *callable.self, callable.name, args);
    case Callable::Kind::kMacro:
      return CallMacro(*callable.macro, args);
  }
  return Value();
}

Value Interpreter::CallMacro(const Macro& macro, const Args& args) {
  if (args.positional.size() > macro.params.size()) {
    rt_->Fail(
        absl::StrFormat("macro '%s' takes at most %d arguments", macro.name, macro.params.size()));
    return Value();
  }
  // Macros are defined in the outermost scope and see that one, not the caller's.
  ScopeGuard guard(this, &root_);
  size_t num_required = macro.params.size() - macro.defaults.size();
  size_t num_used = 0;
  for (size_t i = 0; i < macro.params.size(); ++i) {
    const Value* given = i < args.positional.size() ? &args.positional[i] : nullptr;
    for (const auto& [name, value] : args.named) {
      if (name != macro.params[i]) continue;
      if (given != nullptr) rt_->Fail(absl::StrFormat("argument '%s' twice", name));
      given = &value;
      ++num_used;
    }
    if (given != nullptr) {
      scope_->Set(macro.params[i], *given);
    } else if (i >= num_required) {
      scope_->Set(macro.params[i], Eval(*macro.defaults[i - num_required]));
    } else {
      scope_->Set(macro.params[i], Value::MakeUndefined(absl::StrFormat(
                                       "parameter '%s' was not provided", macro.params[i])));
    }
  }
  if (num_used != args.named.size()) {
    rt_->Fail(absl::StrFormat("macro '%s' has no such keyword argument", macro.name));
  }
  if (!rt_->ok()) return Value();
  std::string text;
  std::string* outer = std::exchange(out_, &text);
  Execute(macro.body);
  out_ = outer;
  return Value(std::move(text));
}

}  // namespace zipage::jinja
