// The expression half of the template parser, in the order of Jinja's grammar.
#include <algorithm>
#include <charconv>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_parser.h"
#include "scheduler/text/jinja_parser_impl.h"

namespace zipage::jinja {

Parser::Nesting::Nesting(Parser* parser, int limit) : parser_(parser) {
  if (++parser_->nesting_ > limit) parser_->Fail("an expression is nested too deeply");
}

Parser::ExprBox Parser::New(Expr::Kind kind, int line) {
  auto node = std::make_unique<Expr>();
  node->kind = kind;
  node->line = line;
  return node;
}

void Parser::AddArg(Expr* parent, ExprBox child) {
  if (child != nullptr) {
    parent->depth = std::max(parent->depth, child->depth + 1);
    if (parent->depth > kMaxExprDepth) Fail("an expression is nested too deeply");
  }
  parent->args.push_back(std::move(child));
}

Parser::ExprBox Parser::ParseExpression() {
  Nesting nesting(this, kMaxExprDepth);
  ExprBox node = ParseOr();
  while (ok() && Current().IsName("if")) {
    ExprBox cond = New(Expr::Kind::kCond, Take().line);
    AddArg(cond.get(), ParseOr());
    AddArg(cond.get(), std::move(node));
    AddArg(cond.get(), SkipName("else") ? ParseExpression() : nullptr);
    node = std::move(cond);
  }
  return node;
}

Parser::ExprBox Parser::ParseOr() {
  ExprBox left = ParseAnd();
  while (ok() && Current().IsName("or")) {
    ExprBox node = New(Expr::Kind::kOr, Take().line);
    AddArg(node.get(), std::move(left));
    AddArg(node.get(), ParseAnd());
    left = std::move(node);
  }
  return left;
}

Parser::ExprBox Parser::ParseAnd() {
  ExprBox left = ParseNot();
  while (ok() && Current().IsName("and")) {
    ExprBox node = New(Expr::Kind::kAnd, Take().line);
    AddArg(node.get(), std::move(left));
    AddArg(node.get(), ParseNot());
    left = std::move(node);
  }
  return left;
}

Parser::ExprBox Parser::ParseNot() {
  Nesting nesting(this, kMaxExprDepth);
  if (!ok() || !Current().IsName("not")) return ParseCompare();
  ExprBox node = New(Expr::Kind::kNot, Take().line);
  AddArg(node.get(), ParseNot());
  return node;
}

Parser::ExprBox Parser::ParseCompare() {
  ExprBox first = ParseSum();
  ExprBox node = New(Expr::Kind::kCompare, Current().line);
  AddArg(node.get(), std::move(first));
  while (ok()) {
    std::string op;
    for (std::string_view known : {"==", "!=", "<", "<=", ">", ">="}) {
      if (Current().IsOperator(known)) op = known;
    }
    if (!op.empty()) {
      Take();
    } else if (SkipName("in")) {
      op = "in";
    } else if (Current().IsName("not") && Ahead().IsName("in")) {
      Take();
      Take();
      op = "not in";
    } else {
      break;
    }
    node->ops.push_back(std::move(op));
    AddArg(node.get(), ParseSum());
  }
  if (!node->ops.empty()) return node;
  return ExprBox(const_cast<Expr*>(node->args[0].release()));
}

Parser::ExprBox Parser::ParseSum() {
  ExprBox left = ParseConcat();
  while (ok() && (Current().IsOperator("+") || Current().IsOperator("-"))) {
    Token op = Take();
    ExprBox node = New(Expr::Kind::kBinary, op.line);
    node->name = op.value;
    AddArg(node.get(), std::move(left));
    AddArg(node.get(), ParseConcat());
    left = std::move(node);
  }
  return left;
}

Parser::ExprBox Parser::ParseConcat() {
  ExprBox first = ParseProduct();
  if (!Current().IsOperator("~")) return first;
  ExprBox node = New(Expr::Kind::kConcat, Current().line);
  AddArg(node.get(), std::move(first));
  while (ok() && SkipOperator("~")) AddArg(node.get(), ParseProduct());
  return node;
}

Parser::ExprBox Parser::ParseProduct() {
  ExprBox left = ParsePower();
  auto at_operator = [&] {
    for (std::string_view op : {"*", "/", "//", "%"}) {
      if (Current().IsOperator(op)) return true;
    }
    return false;
  };
  while (ok() && at_operator()) {
    Token op = Take();
    ExprBox node = New(Expr::Kind::kBinary, op.line);
    node->name = op.value;
    AddArg(node.get(), std::move(left));
    AddArg(node.get(), ParsePower());
    left = std::move(node);
  }
  return left;
}

Parser::ExprBox Parser::ParsePower() {
  ExprBox left = ParseUnary(true);
  while (ok() && Current().IsOperator("**")) {
    ExprBox node = New(Expr::Kind::kBinary, Take().line);
    node->name = "**";
    AddArg(node.get(), std::move(left));
    AddArg(node.get(), ParseUnary(true));
    left = std::move(node);
  }
  return left;
}

Parser::ExprBox Parser::ParseUnary(bool with_filter) {
  Nesting nesting(this, kMaxExprDepth);
  ExprBox node;
  if (ok() && (Current().IsOperator("-") || Current().IsOperator("+"))) {
    Token op = Take();
    node = New(op.value == "-" ? Expr::Kind::kNegate : Expr::Kind::kPlus, op.line);
    AddArg(node.get(), ParseUnary(false));
  } else {
    node = ParsePrimary();
  }
  node = ParsePostfix(std::move(node));
  return with_filter ? ParseFilters(std::move(node)) : std::move(node);
}

Parser::ExprBox Parser::ParsePrimary() {
  ExprBox node = New(Expr::Kind::kConst, Current().line);
  if (!ok()) return node;
  Token token = Current();
  if (token.IsOperator("[")) return ParseList();
  if (token.IsOperator("{")) return ParseDict();
  Take();
  if (token.IsOperator("(")) {
    node = ParseTuple(/*with_condition=*/true, /*in_parentheses=*/true);
    Expect(Type::kOperator, ")");
  } else if (token.type == Type::kName) {
    if (token.value == "true" || token.value == "True") {
      node->value = Value(true);
    } else if (token.value == "false" || token.value == "False") {
      node->value = Value(false);
    } else if (token.value == "none" || token.value == "None") {
      node->value = Value::MakeNone();
    } else {
      node->kind = Expr::Kind::kName;
      node->name = token.value;
    }
  } else if (token.type == Type::kString) {
    std::string text = token.value;
    while (Current().type == Type::kString) text += Take().value;
    node->value = Value(std::move(text));
  } else if (token.type == Type::kInteger) {
    int64_t number = 0;
    const char* end = token.value.data() + token.value.size();
    auto [ptr, error] = std::from_chars(token.value.data(), end, number);
    if (error != std::errc() || ptr != end) Unsupported("the integer " + token.value);
    node->value = Value(number);
  } else if (token.type == Type::kFloat) {
    double number = 0;
    const char* end = token.value.data() + token.value.size();
    auto [ptr, error] = std::from_chars(token.value.data(), end, number);
    if (error != std::errc() || ptr != end) Unsupported("the number " + token.value);
    node->value = Value(number);
  } else {
    Fail(token.type == Type::kOperator ? absl::StrFormat("unexpected '%s'", token.value)
                                       : "expected an expression");
  }
  return node;
}

bool Parser::AtTupleEnd() const {
  const Token& t = Current();
  return t.type == Type::kVariableEnd || t.type == Type::kBlockEnd || t.IsOperator(")");
}

// One expression, or a tuple of several. Without parentheses there has to be one at least.
Parser::ExprBox Parser::ParseTuple(bool with_condition, bool in_parentheses) {
  ExprBox tuple = New(Expr::Kind::kTuple, Current().line);
  bool is_tuple = false;
  while (ok()) {
    if (!tuple->args.empty()) Expect(Type::kOperator, ",");
    if (AtTupleEnd()) break;
    AddArg(tuple.get(), with_condition ? ParseExpression() : ParseOr());
    if (!Current().IsOperator(",")) break;
    is_tuple = true;
  }
  if (is_tuple) return tuple;
  if (tuple->args.size() == 1) return ExprBox(const_cast<Expr*>(tuple->args[0].release()));
  if (!in_parentheses) Fail("expected an expression");
  return tuple;
}

Parser::ExprBox Parser::ParseList() {
  ExprBox node = New(Expr::Kind::kList, Take().line);
  while (ok() && !Current().IsOperator("]")) {
    if (!node->args.empty()) Expect(Type::kOperator, ",");
    if (Current().IsOperator("]")) break;
    AddArg(node.get(), ParseExpression());
  }
  Expect(Type::kOperator, "]");
  return node;
}

Parser::ExprBox Parser::ParseDict() {
  ExprBox node = New(Expr::Kind::kDict, Take().line);
  while (ok() && !Current().IsOperator("}")) {
    if (!node->args.empty()) Expect(Type::kOperator, ",");
    if (Current().IsOperator("}")) break;
    AddArg(node.get(), ParseExpression());
    Expect(Type::kOperator, ":");
    AddArg(node.get(), ParseExpression());
  }
  Expect(Type::kOperator, "}");
  return node;
}

Parser::ExprBox Parser::ParsePostfix(ExprBox node) {
  while (ok()) {
    if (Current().IsOperator(".") || Current().IsOperator("[")) {
      node = ParseSubscript(std::move(node));
    } else if (Current().IsOperator("(")) {
      ExprBox call = New(Expr::Kind::kCall, Current().line);
      AddArg(call.get(), std::move(node));
      ParseCallArgs(call.get());
      node = std::move(call);
    } else {
      break;
    }
  }
  return node;
}

Parser::ExprBox Parser::ParseFilters(ExprBox node) {
  while (ok()) {
    if (Current().IsOperator("|")) {
      Take();
      node = ParseFilter(std::move(node));
    } else if (Current().IsName("is")) {
      node = ParseTest(std::move(node));
    } else if (Current().IsOperator("(")) {
      Unsupported("calling the result of a filter or test");
    } else {
      break;
    }
  }
  return node;
}

Parser::ExprBox Parser::ParseSubscript(ExprBox object) {
  Token open = Take();
  ExprBox node = New(Expr::Kind::kItem, open.line);
  AddArg(node.get(), std::move(object));
  if (open.value == ".") {
    if (Current().type == Type::kInteger) {
      AddArg(node.get(), ParsePrimary());
    } else {
      node->kind = Expr::Kind::kAttr;
      node->name = TakeName();
    }
    return node;
  }
  if (Current().IsOperator("]")) Fail("expected a subscript");
  if (!Current().IsOperator(":")) AddArg(node.get(), ParseExpression());
  if (Current().IsOperator(":")) {
    node->kind = Expr::Kind::kSlice;
    if (node->args.size() == 1) AddArg(node.get(), nullptr);
    while (ok() && node->args.size() < 4 && SkipOperator(":")) {
      bool is_open = Current().IsOperator(":") || Current().IsOperator("]");
      AddArg(node.get(), is_open ? nullptr : ParseExpression());
    }
    while (node->args.size() < 4) AddArg(node.get(), nullptr);
  }
  if (Current().IsOperator(",")) Unsupported("a subscript with a comma");
  Expect(Type::kOperator, "]");
  return node;
}

void Parser::ParseCallArgs(Expr* call) {
  Expect(Type::kOperator, "(");
  bool first = true;
  while (ok() && !Current().IsOperator(")")) {
    if (!first) Expect(Type::kOperator, ",");
    first = false;
    if (Current().IsOperator(")")) break;
    if (Current().IsOperator("*") || Current().IsOperator("**")) {
      Unsupported("a call with *args or **kwargs");
    }
    if (Current().type == Type::kName && Ahead().IsOperator("=")) {
      std::string name = Take().value;
      Take();
      ExprBox value = ParseExpression();
      call->depth = std::max(call->depth, value->depth + 1);
      if (call->depth > kMaxExprDepth) Fail("an expression is nested too deeply");
      for (const auto& [other, unused] : call->kwargs) {
        if (other == name) Fail(absl::StrFormat("keyword argument '%s' twice", name));
      }
      call->kwargs.emplace_back(std::move(name), std::move(value));
    } else {
      if (!call->kwargs.empty()) Fail("a positional argument after a keyword argument");
      AddArg(call, ParseExpression());
    }
  }
  Expect(Type::kOperator, ")");
}

// After the `|`.
Parser::ExprBox Parser::ParseFilter(ExprBox input) {
  ExprBox node = New(Expr::Kind::kFilter, Current().line);
  node->name = TakeName();
  if (Current().IsOperator(".")) Unsupported("a filter with a dotted name");
  if (ok() && !IsKnownFilter(node->name)) Unsupported(absl::StrFormat("filter '%s'", node->name));
  AddArg(node.get(), std::move(input));
  if (Current().IsOperator("(")) ParseCallArgs(node.get());
  return node;
}

bool Parser::AtTestArgument() const {
  const Token& t = Current();
  if (t.type == Type::kName) {
    return t.value != "else" && t.value != "or" && t.value != "and";
  }
  return t.type == Type::kString || t.type == Type::kInteger || t.type == Type::kFloat ||
         t.IsOperator("(") || t.IsOperator("[") || t.IsOperator("{");
}

Parser::ExprBox Parser::ParseTest(ExprBox input) {
  ExprBox node = New(Expr::Kind::kTest, Take().line);
  bool negated = SkipName("not");
  node->name = TakeName();
  if (Current().IsOperator(".")) Unsupported("a test with a dotted name");
  if (ok() && !IsKnownTest(node->name)) Unsupported(absl::StrFormat("test '%s'", node->name));
  AddArg(node.get(), std::move(input));
  if (Current().IsOperator("(")) {
    ParseCallArgs(node.get());
  } else if (AtTestArgument()) {
    if (Current().IsName("is")) Fail("tests cannot be chained with 'is'");
    AddArg(node.get(), ParsePostfix(ParsePrimary()));
  }
  if (!negated) return node;
  ExprBox outer = New(Expr::Kind::kNot, node->line);
  AddArg(outer.get(), std::move(node));
  return outer;
}

}  // namespace zipage::jinja
