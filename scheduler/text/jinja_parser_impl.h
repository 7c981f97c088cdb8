#pragma once
// The parser's class: expressions are in jinja_expressions.cc, statements in jinja_parser.cc.
// One parse, one thread. After the first error every method returns quickly and advances to the
// end.

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/text/jinja_ast.h"
#include "scheduler/text/jinja_lexer.h"

namespace zipage::jinja {

class Parser {
 public:
  explicit Parser(const std::vector<Token>& tokens) : tokens_(tokens) {}

  Body ParseTemplate();
  const absl::Status& status() const { return status_; }

 private:
  using Type = Token::Type;
  using Names = std::initializer_list<std::string_view>;

  // --- tokens and errors
  const Token& Current() const { return tokens_[pos_]; }
  const Token& Ahead() const { return tokens_[std::min(pos_ + 1, tokens_.size() - 1)]; }
  Token Take();
  bool SkipName(std::string_view name);
  bool SkipOperator(std::string_view op);
  void Expect(Type type, std::string_view value);
  std::string TakeName();
  bool ok() const { return status_.ok(); }
  void Fail(std::string_view message);
  void Unsupported(std::string_view what);

  // --- statements
  Body ParseBody(Names end_tags);       // up to {% end_tag, which stays
  Body ParseBlockBody(Names end_tags);  // the same after the %} of the tag that opens it
  std::unique_ptr<Stmt> ParseStatement();
  std::unique_ptr<Stmt> ParseFor();
  std::unique_ptr<Stmt> ParseIf();
  std::unique_ptr<Stmt> ParseSet();
  std::unique_ptr<Stmt> ParseMacro();
  std::unique_ptr<Stmt> ParseFilterBlock();
  std::unique_ptr<Stmt> ParseWith();
  std::unique_ptr<Stmt> ParseGeneration();
  std::unique_ptr<Stmt> ParseLoopControl(Stmt::Kind kind);
  ExprPtr ParseTarget(bool with_namespace);

  // --- expressions
  using ExprBox = std::unique_ptr<Expr>;
  ExprBox New(Expr::Kind kind, int line);
  void AddArg(Expr* parent, ExprBox child);
  ExprBox ParseExpression();
  ExprBox ParseOr();
  ExprBox ParseAnd();
  ExprBox ParseNot();
  ExprBox ParseCompare();
  ExprBox ParseSum();
  ExprBox ParseConcat();
  ExprBox ParseProduct();
  ExprBox ParsePower();
  ExprBox ParseUnary(bool with_filter);
  ExprBox ParsePrimary();
  ExprBox ParseTuple(bool with_condition, bool in_parentheses);
  ExprBox ParseList();
  ExprBox ParseDict();
  ExprBox ParsePostfix(ExprBox node);
  ExprBox ParseFilters(ExprBox node);
  ExprBox ParseSubscript(ExprBox node);
  ExprBox ParseFilter(ExprBox node);
  ExprBox ParseTest(ExprBox node);
  void ParseCallArgs(Expr* call);
  bool AtTupleEnd() const;
  bool AtTestArgument() const;

  // Counts nested calls; an error above the limit.
  class Nesting {
   public:
    Nesting(Parser* parser, int limit);
    ~Nesting() { --parser_->nesting_; }

   private:
    Parser* parser_;
  };

  const std::vector<Token>& tokens_;
  size_t pos_ = 0;
  absl::Status status_;
  int nesting_ = 0;
  int block_depth_ = 0;
  int loop_depth_ = 0;        // loops around, inside of the innermost macro
  bool at_top_level_ = true;  // not inside a scope of its own
};

}  // namespace zipage::jinja
